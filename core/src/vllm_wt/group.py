"""Which ranks a trainer has, and the store by which they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt.errors import InvalidInfo, shown


@dataclass(frozen=True)
class StoreGroup:
    """Ranks that share a store, for a trainer without ``torch.distributed``'s groups; given as
    ``group=`` on each of them.

    Args:
        store: A ``torch.distributed`` store that all ranks see, as a ``TCPStore``. Its keys that begin
            with ``vllm-wt/`` are ours.
        rank: Of this process, from 0; that one talks to the engines.
        size: Number of ranks.

    Raises:
        InvalidInfo: It is no store, or there is no such rank.
    """

    store: Any
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.store, Store):
            raise _wrong("store", "a store of torch.distributed", self.store)
        for name in ("rank", "size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise _wrong(name, "an integer", value)
        if self.size < 1:
            raise _wrong("size", "at least 1", self.size)
        if not 0 <= self.rank < self.size:
            raise _wrong("rank", f"0 to {self.size - 1}", self.rank)


def store_group_of(group: Any) -> tuple[StoreGroup, tuple[int, ...]]:
    """What a ``group=`` stands for, and each of its ranks as ``torch.distributed``, and the mesh of a
    DTensor, counts it.

    Raises:
        InvalidInfo: It is no group that this process is in.
    """
    if isinstance(group, StoreGroup):
        return group, tuple(range(group.size))
    try:
        rank = dist.get_rank(group)
        if rank >= 0:
            ranks = tuple(dist.get_process_group_ranks(group))
            return StoreGroup(group.get_group_store(), rank, len(ranks)), ranks
    except Exception:  # of any class: it may be any object
        pass
    raise InvalidInfo(
        "This process is not in the group of the trainer's ranks",
        where="group",
        expected="a torch.distributed group that this rank is in, or a vllm_wt.StoreGroup",
        got=type(group).__name__,
        cure="call torch.distributed.init_process_group first, and connect on the group's ranks only",
    )


def _wrong(name: str, expected: str, got: Any) -> InvalidInfo:
    return InvalidInfo(
        f"A trainer's ranks cannot be found by this {name}",
        where=f"StoreGroup: {name}",
        expected=expected,
        got=shown(got),
        cure="make the same store on all ranks, as TCPStore(host, port, size, rank == 0), and number "
        "them from 0",
    )
