"""Engines with models of many families, into which a trainer pushes checkpoints.

What an engine generates that was started on the same checkpoint is the oracle, bit for bit: its
logprobs and vLLM's own checksums too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import FAMILIES, Family

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.testing.engines import start_llm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.xdist_group("models"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU build"),
]

TRAINER = Path(__file__).with_name("push_checkpoint.py")


@dataclass(frozen=True)
class Answers:
    """What an engine says, which depends on each of its weights."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    embeddings: list[list[float]]
    checksums: list[dict[str, str]]


class Engine:
    """A real engine that a trainer of another process can reach."""

    def __init__(self, llm: Any, family: Family, socket: Path) -> None:
        self._llm = llm
        self._family = family
        self._socket = socket
        self._version = 0
        generator = torch.Generator().manual_seed(1234)
        self._prompts = torch.randint(3, family.vocab, (3, 8), generator=generator).tolist()

    def push(self, checkpoint: Path, times: int) -> None:
        server = RelayServer(self._socket, engine_methods(LocalClient(self._llm)))
        arguments = [self._socket, checkpoint, self._version + 1, times]
        try:
            done = subprocess.run(
                [sys.executable, str(TRAINER), *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
        finally:
            server.close()
        assert done.returncode == 0, done.stderr
        self._version += times

    def answers(self) -> Answers:
        checksums = self._llm.collective_rpc("compute_weight_checksums")
        prompts = [{"prompt_token_ids": ids} for ids in self._prompts]
        if self._family.pooling:
            pooled = [self._llm.embed([prompt], use_tqdm=False)[0] for prompt in prompts]
            return Answers([], [], [list(each.outputs.embedding) for each in pooled], checksums)
        return Answers(*self._generated(prompts), [], checksums)

    def _generated(self, prompts: list[Any]) -> tuple[Any, Any]:
        """Greedy tokens and the likeliest few at each, one request at a time."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=5
        )
        outputs = []
        for prompt in prompts:
            (request,) = self._llm.generate([prompt], params, use_tqdm=False)
            outputs.append(request.outputs[0])
        logprobs = [
            [{token: each.logprob for token, each in step.items()} for step in output.logprobs]
            for output in outputs
        ]
        return [list(output.token_ids) for output in outputs], logprobs


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``with engine(family, checkpoint, tp) as engine``"""

    @contextmanager
    def start(family: Family, checkpoint: Path, tp: int, **settings: Any) -> Iterator[Engine]:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in range(tp)))
        if family.pooling:
            settings |= {"runner": "pooling", "skip_tokenizer_init": False}
        llm = start_llm(checkpoint, "bfloat16", "rdma", tp=tp, **settings)
        try:
            yield Engine(llm, family, tmp_path / "engine.sock")
        finally:
            llm.llm_engine.engine_core.shutdown()

    return start


@pytest.mark.parametrize("tp", [1, 2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_updated_engine_answers_as_one_started_on_the_checkpoint(name, tp, engine, checkpoint):
    family = FAMILIES[name]
    first, second = checkpoint(name, 0), checkpoint(name, 1)
    with engine(family, second, tp) as started:
        expected = started.answers()
    with engine(family, first, tp) as updated:
        before = updated.answers()
        assert before.tokens != expected.tokens or family.pooling
        assert before.embeddings != expected.embeddings or not family.pooling
        assert len(before.checksums) == tp
        updated.push(first, times=3)
        assert updated.answers() == before
        updated.push(second, times=1)
        assert updated.answers() == expected


def test_weights_that_are_not_packed(engine, checkpoint):
    """As on a GPU, linear layers and heads compute with the parameters that were written."""
    name, extension = "llama", "vllm_wt.testing.unpacked.UnpackedWeights"
    family, first, second = FAMILIES[name], checkpoint(name, 0), checkpoint(name, 1)
    with engine(family, second, 1, worker_extension_cls=extension) as started:
        expected = started.answers()
    with engine(family, first, 1, worker_extension_cls=extension) as updated:
        before = updated.answers()
        updated.push(second, times=1)
        assert updated.answers() == expected
    # Of an empty parameter, the digest would be the same.
    ((old,), (new,)) = before.checksums, expected.checksums
    linear = [key for key in old if "_proj" in key]
    assert len(linear) == 8
    assert all(old[key] != new[key] for key in linear)
