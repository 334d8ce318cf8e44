"""Ranks of real vLLM models in plain processes, without an engine.

One process imports vLLM, which takes seconds, and forks a rank for each line of its input: the list
of :func:`main`'s arguments, answered by the number of the new process. A rank connects to the test
that wants it and answers each JSON line of its own by one.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry

from vllm_wt.bridge.arming import own_tensors
from vllm_wt.bridge.loader import ModelWeights
from vllm_wt.loading.batches import batches
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES, as_bytes, meta_of
from vllm_wt.source import SafetensorsSource

Weights = list[tuple[str, torch.Tensor]]


@dataclass
class State:
    """Everything of a model that an update may change, and that it must not move."""

    tensors: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Of each parameter and buffer: shape, strides, dtype, bytes."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Where each of them lies that is not empty."""
    derived: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The same as of parameters, of tensors that are plain attributes of modules."""
    outputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """What layers make of an input that is always the same: packed weights show nowhere else."""

    def unlike(self, expected: State, placed: State | None = None) -> list[str]:
        """What is not equal, bit for bit, or not where it is in ``placed`` (else in ``expected``)."""
        wanted = {**vars(expected), "addresses": (placed or expected).addresses}
        return [
            f"{kind}: {name}"
            for kind, values in wanted.items()
            for name in sorted({*values, *getattr(self, kind)})
            if values.get(name) != getattr(self, kind).get(name)
        ]

    def same(self, other: State) -> list[str]:
        """What is equal, but for what is empty."""
        return [
            f"{kind}: {name}"
            for kind in ("tensors", "derived", "outputs")
            for name, value in getattr(self, kind).items()
            if value[-1] and getattr(other, kind).get(name) == value
        ]


def state_of(model: torch.nn.Module, vllm_config: VllmConfig) -> State:
    state = State()
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    for name, tensor in named:
        state.tensors[name] = _frozen(tensor)
        if tensor.numel():
            state.addresses[name] = tensor.data_ptr()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            for number, tensor in enumerate(values):
                if isinstance(tensor, torch.Tensor):
                    state.derived[f"{name}.{attribute}.{number}"] = _frozen(tensor)
    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=_ROWS):
        for name, module in model.named_modules():
            for kind, output in _outputs(module):
                state.outputs[f"{name} ({kind})"] = _frozen(output)
    return state


def _frozen(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = as_bytes(tensor.detach().contiguous()).numpy().tobytes()
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), data


_ROWS = 5


def _outputs(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Of layers that have weights, but for norms, which compute with their parameters as they are."""
    if isinstance(module, LinearBase):
        unquantised = isinstance(module.quant_method, UnquantizedLinearMethod)
        if unquantised and not hasattr(module, "cpu_linear"):
            return  # a convolution, which its mixer computes
        inputs = _noise(getattr(module, "input_size_per_partition", module.input_size))
        yield "linear", module.quant_method.apply(module, inputs, module.bias)
    elif isinstance(module, VocabParallelEmbedding):
        tokens = torch.arange(module.weight.shape[0])
        yield "embedding", module.quant_method.embedding(module, tokens)
        yield "head", module.quant_method.apply(module, _noise(module.embedding_dim))
    elif isinstance(module, MoERunner):
        config = module.moe_config
        yield "experts", module(_noise(config.hidden_dim), _noise(config.num_experts))


def _noise(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(_ROWS, width, generator=generator).to(torch.bfloat16)


class Rank:
    """What a test can ask of it."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._size = size
        # With no model, vLLM makes the groups of all kinds of models.
        config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=size))
        with set_current_vllm_config(config):
            store = f"file://{folder / 'store'}"
            init_distributed_environment(size, rank, store, rank, "gloo")
            ensure_model_parallel_initialized(size, 1)
        # As vLLM's own runner has it on a host without an accelerator.
        torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *args: None

    def update(
        self,
        first: str,
        second: str,
        pooling: bool = False,
        modes: Sequence[str] = ("layerwise", "reload"),
    ) -> dict[str, Any]:
        """Load one checkpoint, update it to the other, and say what is not as it should be.

        Args:
            first: Folder of the one.
            second: Folder of the other.
            pooling: Whether it is a model of embeddings.
            modes: Of `VLLM_WT_APPLY`, besides the default.
        """
        model, config = self._load(first, pooling)
        other, other_config = self._load(second, pooling)
        a, b = state_of(model, config), state_of(other, other_config)
        del other
        live = Live(model, config, _weights(first), _weights(second))
        answer: dict[str, Any] = {
            "alike": a.same(b),
            "layers": _layers(model),
            "compared": {kind: sorted(values) for kind, values in vars(b).items()},
        }
        answer["identity"] = [line for _ in range(3) for line in live.load(live.first).unlike(a)]
        answer["update"] = live.load(live.second).unlike(b, a)
        answer["report"] = live.weights.report()

        def tried() -> dict[str, Any]:
            return {
                "nbytes": live.nbytes,
                "batches": live.batches,
                "identity": live.load(live.first).unlike(a),
                "update": live.load(live.second).unlike(b, a),
                "report": live.weights.report(),
            }

        answer["nbytes"] = live.nbytes
        answer["slices"], answer["batches"], answer["modes"] = {}, {}, {}
        for name, settings in _SLICES.items():
            live.use(settings)
            answer["slices"][name] = tried()
        for name, (slices, nbytes) in _BATCHES.items():
            live.use(None if slices is None else _SLICES[slices], nbytes)
            answer["batches"][name] = tried()
        live.use(_SLICES["exact"], 0)
        middle = live.batches // 2
        answer["failed"] = [
            {**live.fail(at), "identity": live.load(live.first, at_once).unlike(a)}
            for at, at_once in ((middle, False), (middle + 1, True), (live.batches - 1, False))
        ]
        for mode in modes:
            with _environment(VLLM_WT_APPLY=mode):
                live.rehearse()
                answer["modes"][mode] = tried()
                live.use(_SLICES["exact"], 0)
                answer["modes"][f"{mode} in batches"] = tried()
        return answer

    def _load(self, folder: str, pooling: bool) -> tuple[torch.nn.Module, VllmConfig]:
        """A model as vLLM loads it from a checkpoint."""
        (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        # vLLM asks another process about classes that are not loaded.
        loaded = ModelRegistry.models[architecture].load_model_cls()
        ModelRegistry.register_model(architecture, loaded)
        config = EngineArgs(
            model=folder,
            runner="pooling" if pooling else "generate",
            tensor_parallel_size=self._size,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            gpu_memory_utilization=0.3,
        ).create_engine_config()
        with set_current_vllm_config(config):
            return get_model(vllm_config=config), config


_SLICES: dict[str, dict[str, int]] = {
    "exact": {"gap": 0},  # with the usual gap, tensors as small as these are read as a whole
    "aligned": {"gap": 0, "alignment": 64},
    "usual": {},
    "few": {"gap": 0, "most": 40},
}


_BATCHES: dict[str, tuple[str | None, int]] = {
    "each": (None, 0),
    "sliced": ("exact", 0),
    "some": ("usual", 1 << 16),
}
"""Slices, if any, and bytes of a batch: with none, it is what cannot be divided."""


class Live:
    """A model and two checkpoints to put into it."""

    def __init__(
        self, model: torch.nn.Module, config: VllmConfig, first: Weights, second: Weights
    ) -> None:
        self.first, self.second = first, second
        self._model, self._config = model, config
        self._manifest = Manifest(tuple(meta_of(*pair) for pair in first))
        self.rehearse()

    def rehearse(self) -> None:
        """As a worker that starts with this environment; from here on with whole tensors."""
        self.weights = ModelWeights(self._model, self._config, torch.device("cpu"))
        self._plan = self.weights.rehearse(self._manifest)
        self.use(None)

    def use(self, slices: dict[str, int] | None, nbytes: int | None = None) -> None:
        """From here on, load only what this rank needs, or whole tensors; at once, or in batches."""
        self._slices = None if slices is None else sliced(self._plan, **slices)
        plan = self._plan if self._slices is None else self._slices.plan
        self._batches = None if nbytes is None else batches(plan, nbytes)
        self.weights.use(plan, self._batches)

    @property
    def nbytes(self) -> int:
        """What is read for a load."""
        return self._manifest.nbytes if self._slices is None else self._slices.nbytes

    @property
    def batches(self) -> int:
        return 1 if self._batches is None else len(self._batches)

    def load(self, weights: Weights, at_once: bool = False) -> State:
        """Hand the weights over; their memory is written again afterwards, as a worker's is."""
        if self._slices is None:
            handed = [(name, tensor.clone()) for name, tensor in weights]
        else:
            handed = _cut(dict(weights), self._slices)
        if self._batches is None or at_once:
            self.weights.check(handed)
            self.weights.apply(handed)
            _spoil(handed)
        else:  # on a thread that receives
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._load_in_batches, dict(handed), self._batches).result()
        return state_of(self._model, self._config)

    def fail(self, last: int) -> dict[str, Any]:
        """Load the second checkpoint up to a batch with a tensor that is too short."""
        assert self._batches is not None
        assert self._slices is not None
        values = dict(_cut(dict(self.second), self._slices))
        broken = self._batches[last][0]
        values[broken] = values[broken].flatten()[:1].clone()
        error = "none"
        try:
            self._load_in_batches(values, self._batches[: last + 1])
        except Exception as caught:
            error = type(caught).__name__
        state_of(self._model, self._config)  # it runs, whatever comes out
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {
            "error": error,
            "on meta": [name for name, tensor in named if tensor.is_meta],
            "armed": [name for name, each in self._model.named_modules() if own_tensors(each)],
        }

    def _load_in_batches(
        self, values: dict[str, torch.Tensor], parts: Sequence[Sequence[str]]
    ) -> None:
        for number, names in enumerate(parts):
            handed = [(name, values[name]) for name in names]
            self.weights.apply_batch(number, handed)
            _spoil(handed)


def _spoil(handed: Weights) -> None:
    for _, tensor in handed:
        as_bytes(tensor).fill_(0xA5)


def _cut(weights: dict[str, torch.Tensor], slices: Slices) -> Weights:
    """What a transport hands over: the bytes of each tensor's runs, one after another."""
    handed = []
    for meta in slices.plan.manifest.tensors:
        whole = as_bytes(weights[meta.name])
        parts = [whole[offset : offset + nbytes] for offset, nbytes in slices.runs[meta.name]]
        tensor = torch.cat(parts).view(DTYPES[meta.dtype]).view(meta.shape)
        handed.append((meta.name, tensor))
    return handed


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _weights(folder: str) -> Weights:
    return list(SafetensorsSource(folder))


def _layers(model: torch.nn.Module) -> dict[str, list[str]]:
    """Names of the modules that have weights, by what they are."""
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {id(param) for param in module._parameters.values() if param is not None}
        if isinstance(module, MoERunner):
            kind = "experts"
        elif not own:
            continue
        elif own <= seen:
            kind = "tied"
        elif isinstance(module, LinearBase):
            never = getattr(module, "_cpu_skip_gemm_dispatch", False)
            kind = "linear that is never packed" if never else "linear"
        elif isinstance(module, VocabParallelEmbedding):
            kind = "embedding"
        else:
            kind = type(module).__name__
        seen |= own
        found.setdefault(kind, []).append(name)
    return found


def main(folder: str, rank: int, size: int, unpacked: bool) -> None:
    if unpacked:
        import vllm_wt.testing.unpacked  # noqa: F401  # from here on, in this process
    os.environ["VLLM_DIST_IDENT"] = Path(folder).name
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(folder) / "ranks.sock"))
        lines = connection.makefile("rw")
        print(json.dumps(rank), file=lines, flush=True)
        served: Rank | None = None
        for line in lines:
            try:
                served = served or Rank(rank, size, Path(folder))
                answer = served.update(*json.loads(line))
            except BaseException:
                answer = {"traceback": traceback.format_exc()}
            print(json.dumps(answer), file=lines, flush=True)


def fork_ranks() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()  # vLLM collects garbage at each load, which took most of the time over its imports
    for line in sys.stdin:
        folder, rank, *rest = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(f"{folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR1)  # sent to a rank that does not answer
            main(folder, rank, *rest)
            os._exit(0)
        print(pid, flush=True)


torch.set_num_threads(1)
if __name__ == "__main__":
    fork_ranks()
