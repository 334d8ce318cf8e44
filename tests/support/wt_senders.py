"""Ranks of a trainer that share the sending of the `nccl` backend, and engines of its workers.

Forked and driven as those of wt_ring.py are.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from forking import fork_for_each_line
from wt_ring import full_tensors, memory, serve
from wt_team import ENGINE_METHODS, RANK_METHODS, TeamEngine, TeamRank

from vllm_wt.engine import WeightTransferEngine, WorkerContext
from vllm_wt.source import Cast, as_source
from vllm_wt_nccl.worker import NcclEngine


class SendingRank(TeamRank):
    """One rank, on a host of its own as NCCL sees it. Kinds beyond `TeamRank`'s: meshes of two
    dimensions, and of a cast."""

    def __init__(self, rank: int, world: int, store: str, device: str = "cpu") -> None:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        super().__init__(rank, world, store, device)

    def make(self, kind: str, size: str, seed: int) -> None:
        if kind == "cast":
            super().make("fsdp2", size, seed)
            self.module, self.kind = self.source, kind
            self.source = Cast(as_source(self.module), torch.bfloat16)
            return
        if kind != "hsdp":
            super().make(kind, size, seed)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.kind, self.size = kind, size
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("copies", "shards"))
        self.source = torch.nn.Module()
        for name, tensor in full_tensors(size, seed).items():
            self.source.register_parameter(name, torch.nn.Parameter(tensor))
        fully_shard(self.source, mesh=mesh)

    def fill(self, seed: int) -> None:
        if self.kind not in {"hsdp", "cast"}:
            super().fill(seed)
            return
        from torch.distributed.tensor import distribute_tensor

        own = dict((self.source if self.kind == "hsdp" else self.module).named_parameters())
        with torch.no_grad():
            for name, full in full_tensors(self.size, seed).items():
                if not full.numel():
                    continue
                mesh, placements = own[name].device_mesh, own[name].placements
                own[name].copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))

    def push_together(self, version: Any, deadline_s: Any = 30.0) -> int:
        """Counts the buckets that it sends."""
        side: Any = self.sync._trainer  # type: ignore[union-attr]
        original, self._begun = side._broadcast, 0

        def counted(*args: Any) -> None:
            self._begun += 1
            original(*args)

        side._broadcast = counted
        try:
            return super().push_together(version, deadline_s)
        finally:
            side._broadcast = original

    def forward(self) -> None:
        """Of the model of `make_model`; FSDP2 leaves the root's parameters gathered after it."""
        with torch.no_grad():
            self.source(input_ids=torch.arange(8).unsqueeze(0))

    def reshard(self) -> None:
        self.source.reshard()

    def facts(self) -> dict[str, Any]:
        """What this rank sends, and what it holds for that."""
        trainer: Any = self.sync._trainer  # type: ignore[union-attr]
        own = trainer._buckets
        return {
            "nbytes": own.manifest.nbytes if own.count else 0,
            "buckets": own.count,
            "ring": sum(slot.numel() for slot in trainer._ring.slots) if trainer._ring else 0,
            "senders": trainer._cuts.senders,
            "group": trainer._call.group,
        }

    def plan(self) -> list[dict[str, int]]:
        """How many buckets each rank sends."""
        trainer: Any = self.sync._trainer  # type: ignore[union-attr]
        return [{"buckets": stream.count} for stream in trainer._schedule.streams]

    def begun(self) -> int:
        """Buckets of the last push that this rank has packed."""
        return self._begun

    def lose(self) -> None:
        """Its communicator, as after a broadcast that did not come to its end."""
        trainer: Any = self.sync._trainer  # type: ignore[union-attr]
        trainer._drop_communicator()

    def gathers(self) -> int:
        """Tensors that were gathered here since the last call."""
        number, Gathers.number = Gathers.number, 0
        return number

    def push_measured(self, version: int) -> dict[str, float]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before, began = memory("VmRSS"), time.perf_counter()
        self.push_together(version, 60.0)
        seconds = time.perf_counter() - began
        return {"before": before, "peak": memory("VmHWM"), "seconds": seconds}

    def hold(self, bucket: int, flag: str) -> None:
        """The next push makes this file and does not send this bucket, as long as there is the file."""
        side: Any = self.sync._trainer  # type: ignore[union-attr]
        original = side._broadcast

        def held(communicator: Any, number: int, deadline: Any) -> None:
            if number == bucket:
                side._broadcast = original
                Path(flag).touch()
                while Path(flag).exists():
                    time.sleep(0.005)
            original(communicator, number, deadline)

        side._broadcast = held


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


class ReceivingEngine(TeamEngine):
    """An engine of several workers, each with the whole model."""

    def _engine(self, context: WorkerContext) -> WeightTransferEngine[Any, Any]:
        return NcclEngine(context)


def main(role: str, path: str, *args: Any) -> None:
    if role == "rank":
        Gathers.install()
        own = ("forward", "reshard", "facts", "plan", "begun", "lose", "gathers")
        methods = (*RANK_METHODS, *own, "push_measured", "hold")
        serve(path, SendingRank(*args), methods)
    else:
        serve(path, ReceivingEngine(*args), ENGINE_METHODS)


if __name__ == "__main__":
    # Imported, and nothing computed: threads that compute do not survive a fork.
    import torch.distributed.fsdp
    import torch.distributed.tensor

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    fork_for_each_line(main)
