"""Ranks of a trainer that each hold a part of the weights, for the `sharded` backend, and engines of
workers that each need a part of them.

Forked and driven as those of wt_ring.py are.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from forking import fork_for_each_line
from safetensors.torch import load_file
from wt_cases import Weights
from wt_ring import full_tensors, memory, serve
from wt_team import ENGINE_METHODS, RANK_METHODS, Counted, TeamEngine, TeamRank

from vllm_wt.engine import WeightTransferEngine, WorkerContext
from vllm_wt.loading.apply import DirectWrites
from vllm_wt.loading.plan import Copy, LoadPlan, Parameter
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES, meta_of
from vllm_wt.source import Cast, as_source
from vllm_wt_rdma import nixl
from vllm_wt_sharded.sources import DeclaredShards
from vllm_wt_sharded.worker import ShardedEngine

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size."""


class ShardedRank(TeamRank):
    """One rank. Kinds beyond `TeamRank`'s are of plain tensors, of which each rank has a part:
    ``columns`` of every matrix, ``layers``, ``turns`` or ``experts``; and FSDP2 over a mesh of two
    dimensions (``hsdp``), of one dtype (``float``), or cast as it is sent (``cast``)."""

    def make(self, kind: str, size: str, seed: int) -> None:
        if kind in _PARTS:
            self._full = lambda seed: full_tensors(size, seed)
            self._declare(kind, self._full(seed))
        elif kind in {"hsdp", "float"}:
            self._make_module(kind, size, seed)
        elif kind == "cast":
            super().make("fsdp2", size, seed)
            self.module, self.source = self.source, Cast(as_source(self.source), torch.bfloat16)
            self.kind = kind
        else:
            super().make(kind, size, seed)

    def make_model(self, kind: str, shape: dict[str, Any]) -> None:
        if kind not in _PARTS:
            super().make_model(kind, shape)
            return
        from vllm_wt.testing.models import ModelShape, random_model, randomize

        model = random_model(ModelShape(**shape), seed=0)

        def full(seed: int) -> dict[str, torch.Tensor]:
            randomize(model, seed)
            return dict(model.named_parameters())

        self._full = full
        self._declare(kind, dict(model.named_parameters()))

    def make_of_checkpoints(self, kind: str, folder: str) -> None:
        """A model whose weights of a seed are in the folder's checkpoint ``seed<seed>``."""

        def full(seed: int) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = load_file(f"{folder}/seed{seed}/model.safetensors")
            return found

        self._full = full
        self._declare(kind, full(0))

    def step(self, learning_rate: float) -> None:
        """An optimizer's, on what this rank has."""
        own = list(self.source.parameters())
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(own, lr=learning_rate, weight_decay=0.0).step()

    def _declare(self, kind: str, full: dict[str, torch.Tensor]) -> None:
        self.kind = kind
        self.declared = {
            name: (box[0], tuple(tensor.shape), torch.empty(box[1], dtype=tensor.dtype))
            for name, tensor in full.items()
            if (box := _PARTS[kind](name, tuple(tensor.shape), self.rank, self.world)) is not None
        }
        tensors = Manifest(tuple(meta_of(name, tensor) for name, tensor in full.items())).tensors
        self.source = DeclaredShards(
            self.declared, tensors=tensors, rank=self.rank, ranks=self.world
        )

    def _make_module(self, kind: str, size: str, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.kind, self.size, self.source = kind, size, torch.nn.Module()
        for name, tensor in full_tensors(size, seed).items():
            value = tensor.float() if kind == "float" else tensor
            self.source.register_parameter(name, torch.nn.Parameter(value))
        mesh = self.mesh
        if kind == "hsdp":
            sizes = 2, self.world // 2
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
        fully_shard(self.source, mesh=mesh)

    def fill(self, seed: int) -> None:
        if self.kind in _PARTS:
            full = self._full(seed)
            with torch.no_grad():
                for name, (start, _, part) in self.declared.items():
                    at = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                    part.copy_(full[name][at])
        elif self.kind in {"hsdp", "float"}:
            self._fill_module(seed, self.world // 2 if self.kind == "hsdp" else self.world)
        elif self.kind == "cast":
            kept, self.source, self.kind = self.source, self.module, "fsdp2"
            super().fill(seed)
            self.source, self.kind = kept, "cast"
        else:
            super().fill(seed)

    def _fill_module(self, seed: int, shards: int) -> None:
        own = dict(self.source.named_parameters())
        for name, tensor in full_tensors(self.size, seed).items():
            local = own[name].to_local()
            if local.numel():
                local.detach().copy_(tensor.chunk(shards)[self.rank % shards])

    def move(self) -> None:
        """All that this rank has gets other memory."""
        if self.kind in _PARTS:
            for name, (start, shape, part) in list(self.declared.items()):
                self.declared[name] = start, shape, part.clone()
        else:
            super().move()

    def unshard(self) -> None:
        """As FSDP2 leaves a module after a forward."""
        self.source.unshard()

    def change(self, what: str) -> None:
        if what == "layout":
            del self.declared["w1"]  # the others have it, too
        else:
            super().change(what)

    def gathers(self) -> int:
        """Tensors that were gathered here since the last call."""
        number, Gathers.number = Gathers.number, 0
        return number

    def grown(self, version: int) -> int:
        """Bytes that a push has needed on this rank, beyond what it had before."""
        from pathlib import Path

        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = memory("VmRSS")
        self.push_together(version, 60.0)
        return memory("VmHWM") - before


def _columns(name: str, shape: tuple[int, ...], rank: int, world: int) -> _Box | None:
    """Tensor parallel along the last dimension, as evenly as it goes; vectors are on all ranks."""
    if len(shape) < 2:
        return (0,) * len(shape), shape
    each = -(-shape[-1] // world)
    start = min(each * rank, shape[-1])
    width = min(each, shape[-1] - start)
    return ((*(0 for _ in shape[:-1]), start), (*shape[:-1], width)) if width else None


def _layers(name: str, shape: tuple[int, ...], rank: int, world: int) -> _Box | None:
    """Pipeline parallel: each layer on one rank, what is in none on the first."""
    parts = name.split(".")
    layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else 0
    return ((0,) * len(shape), shape) if layer % world == rank else None


def _turns(name: str, shape: tuple[int, ...], rank: int, world: int) -> _Box | None:
    """Each tensor on one rank."""
    return ((0,) * len(shape), shape) if int(name[1:]) % world == rank else None


def _experts(name: str, shape: tuple[int, ...], rank: int, world: int) -> _Box | None:
    """Expert parallel: each expert on one rank, all else on all."""
    parts = name.split(".")
    if "experts" in parts and int(parts[parts.index("experts") + 1]) % world != rank:
        return None
    return (0,) * len(shape), shape


_PARTS: dict[str, Callable[[str, tuple[int, ...], int, int], _Box | None]] = {
    "columns": _columns,
    "layers": _layers,
    "turns": _turns,
    "experts": _experts,
}


class Gathers:
    """Counted where a rank makes them."""

    number = 0

    @classmethod
    def install(cls) -> None:
        from torch.distributed.tensor import DTensor

        for name in ("full_tensor", "redistribute"):
            setattr(DTensor, name, cls._counted(getattr(DTensor, name)))

    @classmethod
    def _counted(cls, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            cls.number += 1
            return original(*args, **kwargs)

        return call


def part_of(
    takes: str, index: int, shape: tuple[int, ...], worker: int, workers: int
) -> tuple[slice, ...] | None:
    """What a worker has of a tensor; None for nothing.

    Args:
        takes: ``"parts"``: rows of one tensor, columns of the next; ``"even"``: every second tensor.
        index: Of the tensor.
    """
    if takes == "even":
        return () if index % 2 == 0 else None
    dim = index % max(1, len(shape))
    each = -(-shape[dim] // workers)
    return (*[slice(None)] * dim, slice(each * worker, each * (worker + 1)))


class Parts(Weights):
    """Stands in for a model that has a part of what is sent: its plan is as if it had been recorded,
    and it is loaded as core loads parameters."""

    def __init__(self, takes: str, rank: int, workers: int) -> None:
        super().__init__()
        self._place = takes, rank, workers

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        takes, rank, workers = self._place
        copies, parameters, unused = [], {}, []
        for index, (name, dtype, shape) in enumerate(
            (each.name, each.dtype, each.shape) for each in manifest.tensors
        ):
            at = part_of(takes, index, shape, rank, workers)
            if at is None:
                unused.append(name)
                continue
            view = torch.empty(shape, device="meta")[at]
            own = torch.empty(view.shape, device="meta")
            sizes, strides, there = tuple(view.shape), view.stride(), own.stride()
            parameters[name] = Parameter("", name, (), dtype, sizes, there, own.numel(), 0)
            if own.numel():
                first = int(view.storage_offset())
                copies.append(Copy(name, first, strides, (), "", name, 0, there, dtype, sizes))
        return LoadPlan(manifest, tuple(copies), (), parameters, {}, tuple(unused))

    def use(self, plan: LoadPlan, batches: Any = None) -> None:
        parameters = plan.parameters.items()
        self._own = {n: torch.zeros(p.shape, dtype=DTYPES[p.dtype]) for n, p in parameters}
        self._writes = DirectWrites(plan, self._own)

    def apply(self, weights: Any) -> None:
        self._writes.run(dict(weights))
        self.received = {name: tensor.clone() for name, tensor in self._own.items()}


class ShardedTeamEngine(TeamEngine):
    """Workers that take all, or a part each; see `part_of`."""

    def __init__(self, backend: str, workers: int, takes: str) -> None:
        self._takes = takes
        super().__init__(backend, workers, True)

    def _model(self, rank: int, workers: int) -> Weights:
        return Weights() if self._takes == "all" else Parts(self._takes, rank, workers)

    def _engine(self, context: WorkerContext) -> WeightTransferEngine[Any, Any]:
        return ShardedEngine(context)


_METHODS = ("gathers", "grown", "make_of_checkpoints", "step", "unshard")


def main(role: str, path: str, *args: Any) -> None:
    if role == "engine":
        serve(path, ShardedTeamEngine(*args), ENGINE_METHODS)
        return
    Gathers.install()
    Counted.install()
    serve(path, ShardedRank(*args), (*RANK_METHODS, *_METHODS))


if __name__ == "__main__":
    # Imported, and nothing computed: threads that compute do not survive a fork.
    import torch.distributed.fsdp
    import torch.distributed.tensor

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    nixl.load()
    fork_for_each_line(main)
