"""What the ranks of a communicator must know of each other's GPUs before NCCL is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo
from vllm_wt.info import Count, WireInfo

_LOOK_S = 0.002
"""Seconds between two looks at whether a rank has come."""


@dataclass(frozen=True, kw_only=True)
class Gpu(WireInfo):
    """One rank's.

    Args:
        host: By which NCCL tells hosts apart.
        uuid: Of the GPU.
        pid: Of the process.
        library: Release of NCCL that it runs.
    """

    host: str
    uuid: str
    pid: Count
    library: str


def exchanged(store: Store, rank: int, size: int, mine: Gpu, deadline: Deadline) -> list[Gpu]:
    """Those of all ranks, in order, once all have come.

    Raises:
        Timeout: Not all have, in time.
        InvalidInfo: What a rank has left is no such thing.
    """
    store.set(f"gpu/{rank}", json.dumps(mine.to_wire()))
    keys = [f"gpu/{other}" for other in range(size)]
    for other, key in enumerate(keys):
        while not store.check([key]):
            deadline.check(
                "Not all members have come to the communicator in time",
                where=f"rank {rank} of {size}",
                got=f"none that is rank {other}",
            )
            deadline.wait(_LOOK_S)
    return [_decoded(bytes(store.get(key))) for key in keys]


def require_apart(gpus: Sequence[Gpu]) -> None:
    """Each rank has a GPU of its own, without which NCCL can't start.

    Raises:
        InvalidInfo: Two have the same.
    """
    for (one, first), (other, second) in combinations(enumerate(gpus), 2):
        if (first.host, first.uuid) == (second.host, second.uuid):
            raise InvalidInfo(
                "Two ranks of the communicator are on one GPU, which NCCL does not allow",
                where=f"host {first.host}",
                expected="a GPU for each of the trainer's ranks and of the workers",
                got=f"ranks {one} (pid {first.pid}) and {other} (pid {second.pid}) on GPU "
                f"{first.uuid}",
                cure='use backend="ipc" where a trainer and a worker share a GPU; else give each its '
                "own by CUDA_VISIBLE_DEVICES",
            )


def require_one_library(gpus: Sequence[Gpu]) -> None:
    """All run the same NCCL: releases don't speak with each other.

    Raises:
        InvalidInfo: They do not.
    """
    for rank, gpu in enumerate(gpus):
        if gpu.library != gpus[0].library:
            raise InvalidInfo(
                "The ranks of the communicator run different releases of NCCL",
                where=f"rank {rank}, pid {gpu.pid}, host {gpu.host}",
                expected=f"NCCL {gpus[0].library}, as rank 0",
                got=f"NCCL {gpu.library}",
                cure="install the same torch on both sides, or the same nvidia-nccl package",
            )


def _decoded(said: bytes) -> Gpu:
    try:
        data = json.loads(said)
    except ValueError:
        data = None
    return Gpu.from_wire(data, backend="nccl")
