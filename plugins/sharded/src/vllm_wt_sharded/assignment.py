"""Which owner gives which piece: shares of bytes made into rows.

The pieces of a group, worker after worker and layer after layer, are laid along a line of its
bytes. Owners take turns on that line, each for its share of a turn, so that a worker has several
sources at any time. A piece is given by the owner in whose stretch its middle lies; a piece that is
large enough to matter is cut where the stretches meet. In a group of few pieces rounding to whole
ones may be far off; what an owner has given too much or too little there counts in the next group.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from vllm_wt_sharded.balance import Floats, Shares
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.rewriting import Cut

_PIECES_A_TURN = 6
"""Of each owner, so that rounding to whole pieces is small and a worker's sources are mixed."""
_FEW = 8
"""Pieces for each owner, up to which a group has few."""
_SLIVER = 0.25
"""Of the least size that is cut: what is less is left with its neighbour."""
_CUTS_A_TURN = 8
"""Least sizes in an owner's part of a turn, where pieces are cut: slivers are few then."""


class Turns:
    """The owners' turns in every group, and how far along each group's line pieces have come.

    Args:
        shares: Bytes that each owner gives.
        pieces: (groups,), pieces of each group.
        largest: (groups,), bytes of its largest one.
        least_cut: Bytes below which no piece is cut.
    """

    def __init__(self, shares: Shares, pieces: Ints, largest: Ints, least_cut: float) -> None:
        groups = shares.groups
        total = np.array([group.nbytes for group in groups], dtype=np.float64)
        self._least_cut = least_cut
        self._size = np.array([len(group.owners) for group in groups], dtype=np.int64)
        self._first = np.cumsum(self._size) - self._size
        most = pieces // (_PIECES_A_TURN * self._size)
        by_cuts = total // (_CUTS_A_TURN * self._size * max(least_cut, 1.0))
        most = np.where(largest > least_cut, np.minimum(most, by_cuts), most).astype(np.int64)
        turns = [_turns(*each) for each in zip(most.tolist(), pieces.tolist(), strict=True)]
        self._turn = np.maximum(total, 1) / np.array(turns, dtype=np.float64)
        # Of its own in each group: else all would begin with their first owners.
        self._phase = np.array([_phase(group.owners, group.far) for group in groups])
        self._ends = [np.cumsum(given) / sum(given) for given in shares.given]
        flat = [np.append(ends[:-1], 1.0) + i for i, ends in enumerate(self._ends)]
        self._flat = np.concatenate([np.empty(0), *flat])
        self._done = np.zeros(len(groups))
        self._few = (pieces <= _FEW * self._size) & (self._size > 1)
        self._ranks = [group.owners for group in groups]
        self._left = [list(given) for given in shares.given]
        self._awaited = pieces.tolist()
        self._owed = [0.0] * len(shares.base)

    def take(self, group: Ints, nbytes: Ints, piece: Ints, size: Ints) -> tuple[Ints, list[Cut]]:
        """The owners of a worker's pieces, which follow those of earlier calls.

        Args:
            group: (n,), of each piece.
            nbytes: (n,).
            piece: (n,), index into ``size``.
            size: (pieces, dims), of pieces that many have in common.

        Returns:
            (n,), the owner's place in its group; and the pieces that are cut.
        """
        owner = np.zeros(len(group), dtype=np.int64)
        several = np.flatnonzero(self._size[group] > 1)
        if not len(several):
            return owner, []
        key = group[several]
        if len(self._size) < 1 << 16:  # which numpy sorts several times as fast
            key = key.astype(np.uint16)
        several = several[np.argsort(key, kind="stable")]
        own, length = group[several], nbytes[several].astype(np.float64)
        end = np.cumsum(length)
        heads = np.flatnonzero(np.diff(own, prepend=-1))
        before = np.repeat(end[heads] - length[heads], np.diff(np.append(heads, len(own))))
        end += self._done[own] - before
        begin = end - length
        self._done[own] = end  # the last of each group stays
        owner[several] = self._at(own, (begin + end) / 2)
        by_debt = self._few[own]
        cuts = []
        for i in np.flatnonzero(length > self._least_cut).tolist():
            row = int(several[i])
            if (size[piece[row]] == 1).all():  # it cannot be cut
                continue
            cut = self._cut(row, int(own[i]), begin[i], end[i], size[piece[row]])
            owner[row] = cut.givers[0]
            if len(cut.givers) > 1:
                cuts.append(cut)
            if by_debt[i]:
                by_debt[i] = False
                each = np.diff(cut.edges) * (length[i] / cut.edges[-1])
                self._give(int(own[i]), cut.givers, each.tolist())
        for i in np.flatnonzero(by_debt).tolist():
            owner[several[i]] = self._by_debt(int(own[i]), length[i])
        return owner, cuts

    def _by_debt(self, group: int, nbytes: float) -> int:
        """The owner that has most left to give, here and from groups before; it gives these bytes."""
        left, ranks = self._left[group], self._ranks[group]
        chosen = max(range(len(ranks)), key=lambda k: left[k] + self._owed[ranks[k]])
        self._give(group, (chosen,), [nbytes])
        return chosen

    def _give(self, group: int, givers: Sequence[int], nbytes: Sequence[float]) -> None:
        left = self._left[group]
        for k, each in zip(givers, nbytes, strict=True):
            left[k] -= each
        self._awaited[group] -= 1
        if self._awaited[group] == 0:
            for rank, each in zip(self._ranks[group], left, strict=True):
                self._owed[rank] += each

    def _at(self, group: Ints, place: Floats) -> Ints:
        turn = (place / self._turn[group] + self._phase[group]) % 1.0
        found = np.searchsorted(self._flat, group + turn, side="right") - self._first[group]
        owner: Ints = np.minimum(found, self._size[group] - 1)
        return owner

    def _cut(self, row: int, group: int, begin: float, end: float, size: Ints) -> Cut:
        dim = int(np.flatnonzero(size > 1)[0])
        turn, phase = self._turn[group], self._phase[group]
        before, after = (_given(self._ends[group], place / turn + phase) for place in (begin, end))
        amounts = (after - before) * turn
        amounts[(amounts < self._least_cut * _SLIVER) & (amounts < amounts.max())] = 0.0
        owners = np.flatnonzero(amounts)
        ends = np.cumsum(amounts[owners])
        along = np.rint(ends / ends[-1] * size[dim])
        edges = np.concatenate([[0], along.astype(np.int64)])
        kept = np.flatnonzero(np.diff(edges))
        return Cut(row, tuple(owners[kept].tolist()), (0, *edges[kept + 1].tolist()), dim)


def _given(ends: Floats, place: float) -> Floats:
    """Turns that each owner has given of what lies before a place, itself in turns."""
    whole, part = divmod(place, 1.0)
    starts = np.append(0.0, ends[:-1])
    given: Floats = whole * (ends - starts) + np.clip(part - starts, 0.0, ends - starts)
    return given


def _phase(owners: tuple[int, ...], far: tuple[int, ...]) -> float:
    return zlib.crc32(np.array([*owners, *far], dtype="<i4").tobytes()) / 2**32


def _turns(most: int, pieces: int) -> int:
    """How many turns the owners take: a prime, so that pieces of one size fall differently in each."""
    for count in range(min(most, 4093), 1, -1):
        if pieces % count and all(count % k for k in range(2, int(count**0.5) + 1)):
            return count
    return 1
