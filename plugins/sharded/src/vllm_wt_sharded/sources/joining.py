"""What all ranks of a trainer hold, from what each of them does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_wt.deadline import INIT_S, asked_for
from vllm_wt.errors import InvalidInfo, ManifestMismatch, WeightTransferError
from vllm_wt.team import Team
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.sources.base import ShardedSource

_WHERE = "layout"


def joined(layouts: Sequence[Layout]) -> Layout:
    """The layouts of all ranks, in their order, as one.

    Raises:
        ManifestMismatch: They are of different tensors, one has rows of another rank, or nobody holds
            some part of a tensor.
    """
    for rank, layout in enumerate(layouts):
        others = layout.rank[layout.rank != rank]
        if len(others):
            raise ManifestMismatch(
                f"The layout of rank {rank} has rows of another rank",
                backend=BACKEND,
                where=f"{_WHERE} of rank {rank}",
                expected=f"rows of rank {rank} only",
                got=f"some of rank {int(others[0])}",
                cure="give each source the rank that its process has in the group",
            )
    whole = Layout.joined(layouts)
    whole.require_covering()
    return whole


def exchange(source: ShardedSource, group: Any, *, deadline_s: float = INIT_S) -> Layout:
    """What all ranks hold; all of them call it, and get the same. Nothing is pickled.

    Args:
        source: This rank's.
        group: The ``torch.distributed`` group of the trainer's ranks. A connection of its own is made
            between them, so that a failure disturbs no collective of the trainer's.
        deadline_s: Seconds for all of it.

    Raises:
        InvalidInfo: The source is of another rank than this process is in the group.
        ManifestMismatch: As of :func:`joined`; on all ranks.
        Timeout, TransportError: A rank did not come, or is gone.
        WeightTransferError: What a source has refused, be it of another rank.
    """
    deadline = asked_for(deadline_s)
    team = Team(group, deadline)
    try:
        wire: dict[str, Any] | None = None
        error: WeightTransferError | None = None
        try:
            _require_place(source, team)
            wire = source.layout().to_wire()
        except WeightTransferError as caught:
            error = caught
        told = team.agree({"layout": wire}, error, deadline, where=_WHERE)
        return joined([Layout.from_wire(each["layout"]) for each in told])
    finally:
        team.close()


def _require_place(source: ShardedSource, team: Team) -> None:
    if (source.rank, source.ranks) != (team.rank, team.size):
        raise InvalidInfo(
            "This source is of another rank",
            backend=BACKEND,
            where=_WHERE,
            expected=f"rank {team.rank} of {team.size}, as the group has it",
            got=f"rank {source.rank} of {source.ranks}",
            cure="give the source rank= and ranks= of the group",
        )
