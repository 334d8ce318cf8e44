"""Needs whose pieces are others than their pattern has: cut between owners, or merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.pieces import PieceTable

_Part = tuple[tuple[int, ...], tuple[int, ...], int]
"""First index, size, and the source's row."""


@dataclass(frozen=True)
class Cut:
    """A piece of which several give a part, one after the other along one dimension.

    Args:
        piece: Which of the worker's.
        givers: One for each part: a place in the piece's group, or a source row.
        edges: Where the parts begin along ``dim``, and where the last ends, from 0.
        dim: The first dimension of more than one index.
    """

    piece: int
    givers: tuple[int, ...]
    edges: tuple[int, ...]
    dim: int


def rewritten(
    table: PieceTable,
    pattern: npt.NDArray[np.int32],
    source_row: npt.NDArray[np.int32],
    cuts: Sequence[Cut],
    mergeable: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The patterns and source rows of one worker when pieces are cut, and neighbours merged.

    Args:
        table: The patterns; new ones are added to it.
        pattern: (needs,), before.
        source_row: (n,), of each piece, before.
        cuts: What is cut; the givers are source rows.
        mergeable: (patterns,), of which one source row may have given several pieces.
    """
    if not cuts and not mergeable[pattern].any():
        return pattern, source_row
    which, piece = table.expanded(pattern)
    cut_by_piece = {cut.piece: cut for cut in cuts}
    maybe = np.flatnonzero(mergeable[pattern][which])
    order = maybe[np.lexsort((source_row[maybe], which[maybe]))]
    same = (np.diff(which[order]) == 0) & (np.diff(source_row[order]) == 0)
    needs = {*which[list(cut_by_piece)].tolist(), *which[order[1:][same]].tolist()}
    if not needs:
        return pattern, source_row
    start, size = table.start, table.size
    pattern = pattern.copy()
    kept, done = [], 0
    for need in sorted(needs):
        begin, end = np.searchsorted(which, [need, need + 1]).tolist()
        parts: list[_Part] = []
        for i in range(begin, end):
            whole = (tuple(start[piece[i]].tolist()), tuple(size[piece[i]].tolist()))
            parts.extend(
                _parts(*whole, cut_by_piece[i])
                if i in cut_by_piece
                else [(*whole, int(source_row[i]))]
            )
        parts = _merged(parts)
        pattern[need] = table.find(
            np.array([part[0] for part in parts]), np.array([part[1] for part in parts])
        )
        kept += [source_row[done:begin], np.array([part[2] for part in parts], dtype=np.int32)]
        done = end
    return pattern, np.concatenate([*kept, source_row[done:]])


def _parts(start: tuple[int, ...], size: tuple[int, ...], cut: Cut) -> list[_Part]:
    d = cut.dim
    return [
        (
            (*start[:d], start[d] + begin, *start[d + 1 :]),
            (*size[:d], end - begin, *size[d + 1 :]),
            giver,
        )
        for giver, begin, end in zip(cut.givers, cut.edges[:-1], cut.edges[1:], strict=True)
    ]


def _merged(parts: list[_Part]) -> list[_Part]:
    """Neighbours of one source row that make a box are one part; in ascending order."""
    count = 0
    while count != len(parts):
        count = len(parts)
        for d in reversed(range(len(parts[0][0]))):
            parts = _merged_along(parts, d)
    return sorted(parts)


def _merged_along(parts: list[_Part], d: int) -> list[_Part]:
    def others(part: _Part) -> tuple[object, ...]:
        start, size, row = part
        return row, start[:d], start[d + 1 :], size[:d], size[d + 1 :]

    found: list[_Part] = []
    for part in sorted(parts, key=lambda part: (others(part), part[0][d])):
        start, size, row = part
        last = found[-1] if found else part
        if found and others(last) == others(part) and last[0][d] + last[1][d] == start[d]:
            grown = last[1][d] + size[d]
            found[-1] = (last[0], (*size[:d], grown, *size[d + 1 :]), row)
        else:
            found.append(part)
    return found
