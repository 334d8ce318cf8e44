"""How weights get into a live engine's modules on a GPU: written directly, module by module through
vLLM's layerwise reload, or all of them through it.

The oracle is a fresh engine of the same setting that loads the last of the checkpoints: by greedy
tokens and logprobs, and by digests of all its parameters and buffers. For the checkpoints before,
it is the other ways.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import PeerDead
from vllm_wt.testing.models import ModelShape, prompts, random_model, randomize, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

APPLY = "VLLM_WT_APPLY"
DIRECT, LAYERWISE, RELOAD = "direct", "layerwise", "reload"
"""The first is what an engine does unless told otherwise."""

SEEDS = (1, 2, 3)
NEW_TOKENS, TOP = 16, 5

WRITTEN = {
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "RMSNorm",
    "UnquantizedFusedMoEMethod TRITON",
}
"""Kinds of modules that direct writes are for."""
QUANTIZED = "Fp8"
"""How the kinds begin that a direct write would leave without their scales."""


@dataclass(frozen=True)
class Setting:
    """A model and how an engine runs it."""

    experts: bool
    fp8: bool

    def __str__(self) -> str:
        return ("moe" if self.experts else "dense") + ("-fp8" if self.fp8 else "")

    @property
    def shape(self) -> ModelShape:
        # The vocabulary is padded.
        return ModelShape(hidden=256, layers=2, vocab=2000, tied=not self.experts, dtype="bfloat16")

    def engine_arguments(self) -> dict[str, Any]:
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
        if self.experts:
            graphs["cudagraph_mode"] = "FULL_DECODE_ONLY"
        return {
            "enforce_eager": False,
            "compilation_config": graphs,
            "max_num_seqs": 8,
            "worker_extension_cls": "wt_apply.ApplyExtension",
            **({"quantization": "fp8"} if self.fp8 else {}),
        }

    def save(self, seed: int, folder: Path) -> Path:
        """A checkpoint of the model; the weights of any two that follow each other differ in scale."""
        shape = self.shape
        model = (_random_mixture if self.experts else random_model)(shape, seed)
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim > 1:
                    param.mul_(1.5 if seed % 2 else 1.0)
        checkpoint = folder / f"seed{seed}"
        save_checkpoint(model, checkpoint)
        return checkpoint


SETTINGS = [
    Setting(experts=False, fp8=False),
    Setting(experts=False, fp8=True),
    Setting(experts=True, fp8=False),
    Setting(experts=True, fp8=True),
]


@dataclass(frozen=True)
class Seen:
    """What an engine does and holds."""

    logprobs: list[list[dict[int, float]]]  # the first of each position is the token's own
    digests: dict[str, str]
    scales: dict[str, list[float]]

    @property
    def tokens(self) -> list[list[int]]:
        return [[next(iter(position)) for position in answer] for answer in self.logprobs]

    def require_same(self, other: Seen) -> None:
        names = self.digests.keys() | other.digests.keys()
        assert [n for n in sorted(names) if self.digests.get(n) != other.digests.get(n)] == []
        assert self.scales == other.scales
        assert self.tokens == other.tokens
        assert self.logprobs == other.logprobs


@dataclass
class Case:
    """A setting, its checkpoints, and what engines made of them."""

    setting: Setting
    checkpoints: dict[int, Path]
    seen: dict[str, dict[int, Seen]] = field(default_factory=dict)
    fresh: Seen | None = None

    @property
    def prompts(self) -> list[list[int]]:
        return prompts(self.setting.shape, count=3)

    def look_at(self, engine: Any) -> Seen:
        logprobs = engine.logprobs(self.prompts, NEW_TOKENS, TOP)
        assert all(math.isfinite(p) for a in logprobs for t in a for p in t.values())
        return Seen(logprobs, engine.rpc("wt_digests"), engine.rpc("wt_scales"))


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    setting = request.param
    folder = tmp_path_factory.mktemp(str(setting))
    return Case(setting, {seed: setting.save(seed, folder) for seed in (0, *SEEDS)})


@pytest.mark.parametrize("apply", [DIRECT, LAYERWISE, RELOAD])
def test_three_checkpoints_then_the_same_as_a_fresh_engine(
    case: Case, apply: str, serve: Any, tmp_path: Path
) -> None:
    setting = case.setting
    with (
        running_trainer(tmp_path / "trainer.sock") as trainer,
        running_engine(
            serve, tmp_path, case.checkpoints[0], apply, **setting.engine_arguments()
        ) as e,
    ):
        assert e.graphs
        assert e.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        kinds = e.rpc("wt_kinds")
        print(setting, apply, json.dumps(kinds))
        addresses = e.rpc("wt_addresses")
        trainer.call("load", str(case.checkpoints[SEEDS[0]]))
        trainer.call("connect", str(tmp_path / "engine.sock"))
        before = case.look_at(e)
        assert bool(before.scales) == setting.fp8
        seen: dict[int, Seen] = {}
        for version, seed in enumerate(SEEDS, 1):
            trainer.call("load", str(case.checkpoints[seed]))
            print(setting, apply, json.dumps(trainer.call("push", version)))
            now = seen[seed] = case.look_at(e)
            assert e.rpc("wt_addresses") == addresses
            _require_other_weights(before, now)
            before = now
        if apply != RELOAD:
            report = e.rpc("wt_report")
            print(setting, apply, json.dumps(report))
            _require_ways(report, kinds, apply)
        trainer.call("push", len(SEEDS) + 1)
        case.look_at(e).require_same(before)
    for others in case.seen.values():
        for seed in SEEDS:
            seen[seed].require_same(others[seed])
    case.seen[apply] = seen
    seen[SEEDS[-1]].require_same(_fresh(case, serve, tmp_path))


def _fresh(case: Case, serve: Any, tmp_path: Path) -> Seen:
    """What an engine makes of the last checkpoint that loads it when it starts."""
    if case.fresh is None:
        checkpoint = case.checkpoints[SEEDS[-1]]
        arguments = case.setting.engine_arguments()
        with running_engine(serve, tmp_path, checkpoint, DIRECT, **arguments) as engine:
            case.fresh = case.look_at(engine)
    return case.fresh


def _require_other_weights(before: Seen, now: Seen) -> None:
    assert now.tokens != before.tokens
    weights = [name for name in now.digests if name.endswith("weight")]
    assert [name for name in weights if now.digests[name] == before.digests[name]] == []
    assert [name for name in now.scales if now.scales[name] == before.scales[name]] == []


def _require_ways(report: dict[str, Any], kinds: dict[str, str], apply: str) -> None:
    """Each module got its weights in the way that its kind calls for."""
    assert report.get("whole") is None
    direct, layerwise = set(report["direct"]), set(report["layerwise"])
    quantized = {name for name, kind in kinds.items() if kind.startswith(QUANTIZED)}
    written = {name for name, kind in kinds.items() if kind in WRITTEN}
    assert written
    if apply == LAYERWISE:
        assert direct == set()
    else:
        assert {name: kinds[name] for name in written - direct} == {}
    assert direct & quantized == set()
    # Of an attention layer FP8's method has nothing to load.
    assert {n: kinds[n] for n in quantized - layerwise if "KVCache" not in kinds[n]} == {}


@pytest.mark.parametrize("apply", [DIRECT, RELOAD])
def test_commit_times_of_a_larger_model(apply: str, serve: Any, tmp_path: Path) -> None:
    """A measurement: it asserts nothing about times."""
    checkpoint = tmp_path / "config"
    measure(serve, checkpoint, apply, "cuda", hidden=2048, layers=28, vocab=151936)


def measure(
    serve: Any, checkpoint: Path, apply: str, device: str, *, hidden: int, layers: int, vocab: int
) -> None:
    """Print the stages of some pushes, and how long a copy of the same bytes takes."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256,
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(checkpoint)
    folder = checkpoint.parent
    with (
        running_trainer(folder / "trainer.sock", device) as trainer,
        running_engine(serve, folder, checkpoint, apply, load_format="dummy", max_num_seqs=8),
    ):
        trainer.call("make", str(checkpoint))
        trainer.call("connect", str(folder / "engine.sock"))
        pushes = []
        for version in range(1, 7):
            trainer.call("change")
            pushes.append(trainer.call("push", version))
        rounds = [
            {stage: round(1000 * s, 3) for stage, s in push["engines"]["engine0"].items()}
            for push in pushes
        ]
        print(
            json.dumps(
                {
                    "apply": apply,
                    "nbytes": pushes[0]["nbytes"],
                    "tensors": pushes[0]["tensors"],
                    "flat_copy_ms": round(1000 * trainer.call("flat_copy_s"), 3),
                    "pushes_ms": [round(1000 * push["total_s"], 3) for push in pushes],
                    "rounds_ms": rounds,
                }
            )
        )


@contextmanager
def running_engine(
    serve: Any, folder: Path, checkpoint: Path, apply: str, **arguments: Any
) -> Iterator[Any]:
    """An engine whose worker applies weights in that way."""
    with patch.dict(os.environ, {APPLY: apply}):
        if apply == DIRECT:
            del os.environ[APPLY]
        engine = serve(folder, checkpoint, "bfloat16", **arguments)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def running_trainer(path: Path, device: str = "cuda") -> Iterator[RelayClient]:
    """A trainer in a process of its own, which comes up while an engine starts."""
    script = Path(__file__).with_name("apply_trainer.py")
    log = path.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), str(path), device],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    client = _Late(path, process, log)
    try:
        yield client
    finally:
        process.kill()
        process.communicate()
        client.close()


class _Late:
    """A client that connects with its first call."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self._path, self._process, self._log = path, process, log
        self._client: RelayClient | None = None

    def call(self, method: str, *args: Any) -> Any:
        while self._client is None:
            try:
                self._client = RelayClient(self._path)
            except PeerDead:
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.05)
        return self._client.call(method, *args)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _random_mixture(shape: ModelShape, seed: int) -> Any:
    """A Qwen3-MoE of sizes that Triton's kernels and FP8's take."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 32,
        num_key_value_heads=shape.hidden // 64,
        head_dim=32,
        vocab_size=shape.vocab,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    randomize(model, seed)
    return model.to(getattr(torch, shape.dtype))
