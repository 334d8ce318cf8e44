"""Boxes of indices: which parts of one are covered by which others. Pure geometry, numpy only.

A box is a first index and a size in every dimension, int64; all boxes here have equally many
dimensions, at least one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cells:
    """A box cut into disjoint boxes, each covered by the same others throughout.

    Args:
        start: (n, dims), in ascending order, the first dimension most significant.
        size: (n, dims), at least 1 each.
        covers: For each of the n, the covering boxes' indices, ascending; empty for an orphan.
    """

    start: Ints
    size: Ints
    covers: tuple[tuple[int, ...], ...]


def cells(start: Ints, size: Ints, starts: Ints, sizes: Ints) -> Cells:
    """Cut one box where others begin and end within it, and no finer than needed.

    Args:
        start: (dims,), first index of the box that is cut.
        size: (dims,), its size, at least 1 each.
        starts: (m, dims), of the boxes that may cover it.
        sizes: (m, dims), at least 1 each.
    """
    low = np.maximum(starts, start)
    high = np.minimum(starts + sizes, start + size)
    near = np.flatnonzero((low < high).all(axis=1))
    low, high = low[near], high[near]
    cuts = [
        np.unique(np.concatenate([low[:, d], high[:, d], [start[d], start[d] + size[d]]]))
        for d in range(len(start))
    ]
    first = [np.searchsorted(cuts[d], low[:, d]) for d in range(len(start))]
    last = [np.searchsorted(cuts[d], high[:, d]) for d in range(len(start))]
    grid = np.zeros([len(each) - 1 for each in cuts], dtype=np.int64)
    covers: list[tuple[int, ...]] = [()]
    for i, box in enumerate(near.tolist()):
        part = tuple(slice(int(f[i]), int(e[i])) for f, e in zip(first, last, strict=True))
        known, inverse = np.unique(grid[part], return_inverse=True)
        grid[part] = inverse.reshape(grid[part].shape) + len(covers)
        covers.extend((*covers[cover], box) for cover in known.tolist())
    return _merged(grid, cuts, covers)


def _merged(grid: Ints, cuts: list[Ints], covers: list[tuple[int, ...]]) -> Cells:
    """The cells of the grid, neighbours with one cover taken together, the last dimension first."""
    free = np.ones(grid.shape, dtype=bool)
    corners, ends, found = [], [], []
    for corner in np.ndindex(*grid.shape):
        if not free[corner]:
            continue
        cover = grid[corner]
        end = [index + 1 for index in corner]
        for d in reversed(range(grid.ndim)):
            while end[d] < grid.shape[d]:
                slab = tuple(
                    slice(end[k], end[k] + 1) if k == d else slice(corner[k], end[k])
                    for k in range(grid.ndim)
                )
                if not (free[slab] & (grid[slab] == cover)).all():
                    break
                end[d] += 1
        free[tuple(slice(c, e) for c, e in zip(corner, end, strict=True))] = False
        corners.append([int(cuts[d][index]) for d, index in enumerate(corner)])
        ends.append([int(cuts[d][index]) for d, index in enumerate(end)])
        found.append(covers[cover])
    start = np.array(corners, dtype=np.int64)
    return Cells(start, np.array(ends, dtype=np.int64) - start, tuple(found))
