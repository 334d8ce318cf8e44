"""From what sources hold and workers need to the plan: pure, and the same on every machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vllm_wt.errors import InvalidInfo
from vllm_wt_sharded.assignment import Turns
from vllm_wt_sharded.balance import shared
from vllm_wt_sharded.demand import Demand, WorkerPieces
from vllm_wt_sharded.layout import BACKEND, Layout, require_same_tensors
from vllm_wt_sharded.places import Places
from vllm_wt_sharded.plan import Plan, Share
from vllm_wt_sharded.rewriting import rewritten

_LEAST_CUT = 1 / 256
"""Of what the busiest source gives: a smaller piece is always given by one owner."""


def plan(source: Layout, needs: Layout, *, places: Places | None = None) -> Plan:
    """Plan which source gives each worker what it needs.

    Every needed element is taken once for each row that needs it. Where several sources hold it,
    near ones give it before far ones, and the busiest link is as idle as it can be, within a few
    percent; a large piece is divided between sources for that.

    Args:
        source: What the trainer's ranks hold; boxes may overlap.
        needs: What the workers' ranks need.
        places: Where they are; None for all equally far.

    Raises:
        ManifestMismatch: The two are of different tensors, or nobody holds a part of a need: the
            first such need is named, and the part.
    """
    require_same_tensors(source, needs, where="source and needs")
    return _extended(Plan(source, {}), needs, places)


def with_workers(old: Plan, added: Layout, *, places: Places | None = None) -> Plan:
    """The plan when workers have joined; what the others take stays exactly as it is.

    The new ones take from sources that give little so far. The cost is that of planning for them.

    Args:
        old: The plan without them.
        added: What they need.
        places: As for :func:`plan`.

    Raises:
        InvalidInfo: One of them is in the plan.
        ManifestMismatch: As for :func:`plan`.
    """
    require_same_tensors(old.source, added, where="source and needs")
    for worker in np.unique(added.rank).tolist():
        if worker in old.by_worker:
            raise InvalidInfo(
                f"Worker {worker} is in the plan already",
                backend=BACKEND,
                where=f"worker {worker}",
                expected="a worker that joins",
                got=worker,
                cure="have it leave first",
            )
    return _extended(old, added, places)


def lower_bounds(source: Layout, needs: Layout) -> tuple[float, int]:
    """Bytes that the busiest source gives in any plan at all, at least; and the busiest worker takes.

    Raises:
        ManifestMismatch: As for :func:`plan`.
    """
    require_same_tensors(source, needs, where="source and needs")
    demand = Demand(source, needs, None)
    nothing = np.zeros(source.ranks, dtype=np.int64)
    return shared(demand.groups, nothing, 0).bound, demand.busiest_in


def _extended(old: Plan, needs: Layout, places: Places | None) -> Plan:
    demand = Demand(old.source, needs, places)
    busiest_in = max(demand.busiest_in, int(old.bytes_in.max(initial=0)))
    shares = shared(demand.groups, old.bytes_out, busiest_in)
    turns = Turns(shares, demand.pieces, demand.largest, shares.busiest * _LEAST_CUT)
    added = {each.worker: _share(old.source, demand, turns, each) for each in demand.workers()}
    return Plan(old.source, {**old.by_worker, **added})


def _share(source: Layout, demand: Demand, turns: Turns, each: WorkerPieces) -> Share:
    table = demand.cuts.pieces
    group = demand.group_of(each)
    owner, cuts = turns.take(group, each.nbytes, each.piece, table.size)
    rows, row_at = demand.owners.rows, demand.owners.row_at[each.slot]
    source_row = rows[row_at + owner].astype(np.int32)
    by_row = [
        replace(cut, givers=tuple(int(rows[row_at[cut.piece] + giver]) for giver in cut.givers))
        for cut in cuts
    ]
    pattern, source_row = rewritten(table, each.pattern, source_row, by_row, demand.cuts.mergeable)
    nbytes = each.nbytes
    if pattern is not each.pattern:
        which, piece = table.expanded(pattern)
        nbytes = table.elements[piece] * source.itemsizes[each.tensor][which]
    given = np.bincount(source.rank[source_row], nbytes, source.ranks).astype(np.int64)
    return Share(each.need, each.tensor, pattern, source_row, table, given)
