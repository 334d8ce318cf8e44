"""Who is in a group of the native form, and whether their numbers fit together."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_wt.errors import InvalidInfo
from vllm_wt.info import Identifier, WireInfo
from vllm_wt_nccl.native_info import Number


def _title() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class Member(WireInfo):
    """What one side says of itself before a communicator is made.

    Args:
        rank: In the group; the trainer has 0.
        world_size: That it was told.
        first: Rank of its engine's first worker.
        workers: How many its engine has.
        device: Kind of its device.
        title: Its host and process, for people.
        token: Tells it from others that say the same.
    """

    rank: Number
    world_size: Number
    first: Number
    workers: Number
    device: str
    title: str = field(default_factory=_title)
    token: Identifier = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.title})"


def require_fitting(trainer: Member, workers: Sequence[Member]) -> None:
    """See that these can be in one group; it need not be complete.

    Args:
        trainer: Whose world size counts.
        workers: Those that have come, in order.

    Raises:
        InvalidInfo: They cannot; it has the numbers, and what to give instead.
    """
    for worker in workers:
        if worker.world_size != trainer.world_size:
            raise InvalidInfo(
                "Trainer and engine have been given different world sizes",
                where="world_size",
                expected=f"{trainer.world_size}, which the trainer has ({trainer.title})",
                got=f"{worker.world_size}, of {worker}",
                cure="give all the same: 1 for the trainer, and 1 for each worker of each engine",
            )
        if worker.first < 1:
            raise InvalidInfo(
                f"A worker cannot have rank {worker.first}: the trainer is rank 0",
                where="rank_offset",
                expected=f"1 or more, after the trainer's rank 0 ({trainer.title})",
                got=f"{worker.first}, of {worker}",
                cure="give rank_offset=1 to the first engine, 1 + its number of workers to the next",
            )
        last = worker.first + worker.workers - 1
        if last >= trainer.world_size:
            raise InvalidInfo(
                "An engine's workers do not all have a place in the group",
                where="rank_offset, world_size",
                expected=f"ranks 1 to {trainer.world_size - 1}, of world_size={trainer.world_size}",
                got=f"ranks {worker.first} to {last} of an engine with {worker.workers} workers, "
                f"among them {worker}",
                cure="raise world_size on all sides, to 1 + the workers of all engines, or lower "
                "this engine's rank_offset",
            )
    _require_distinct(workers)
    _require_one_kind(workers)


def missing(trainer: Member, workers: Sequence[Member]) -> str:
    """Which ranks have not come, for people."""
    ranks = {worker.rank for worker in workers}
    absent = [rank for rank in range(1, trainer.world_size) if rank not in ranks]
    more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    return f"{len(ranks)} of {trainer.world_size - 1} workers; missing ranks {absent[:8]}{more}"


def _require_distinct(workers: Sequence[Member]) -> None:
    seen: dict[int, Member] = {}
    for worker in workers:
        other = seen.setdefault(worker.rank, worker)
        if other is not worker:
            raise InvalidInfo(
                f"Two workers have rank {worker.rank}",
                where="rank_offset",
                expected=f"one: {other}",
                got=f"another one: {worker}",
                cure="give each engine a rank_offset of its own: 1 for the first, and for each other "
                "one that of the engine before plus the number of that one's workers",
            )


def _require_one_kind(workers: Sequence[Member]) -> None:
    if len({worker.device for worker in workers}) > 1:
        raise InvalidInfo(
            "The workers are on different kinds of device",
            where="device",
            expected=f"all on one kind, as {workers[0]} on {workers[0].device}",
            got=", ".join(f"{worker} on {worker.device}" for worker in workers[:8]),
            cure="make a group for each kind",
        )
