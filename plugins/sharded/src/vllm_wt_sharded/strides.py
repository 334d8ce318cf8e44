"""Strided copies as rows of elements that follow each other, and rows as strided copies again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_wt.loading.plan import Copy
from vllm_wt_sharded.boxes import Ints

Dim = tuple[int, int, int]
"""How many, and the strides of the source and of the destination, in elements."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What a copy reads, as rows of equal length without gaps.

    Args:
        source: (n,), where each begins in the source.
        dest: (n,), where it goes; counted from the copy's own first element.
        length: Elements of a row.
        stride: Of the destination, from an element of a row to the next.
    """

    source: Ints
    dest: Ints
    length: int
    stride: int


@dataclass(frozen=True)
class Regular:
    """Rows at even distances, in any number of dimensions.

    Args:
        source: Where the first one begins in the source.
        dest: Where it goes.
        dims: From the outermost to that along a row.
    """

    source: int
    dest: int
    dims: tuple[Dim, ...]


def rows_of(copy: Copy) -> Rows:
    """A copy as rows; of one element each, where its source has none that follow each other."""
    dims = list(zip(copy.shape, copy.source_strides, copy.dest_strides, strict=True))
    along = max((dim for dim in dims if dim[1] == 1), default=(1, 1, 1))
    if along in dims:
        dims.remove(along)
    source, dest = np.array([copy.source_offset]), np.zeros(1, dtype=np.int64)
    for count, source_stride, dest_stride in dims:
        steps = np.arange(count)
        source = (source[:, None] + steps * source_stride).reshape(-1)
        dest = (dest[:, None] + steps * dest_stride).reshape(-1)
    return Rows(source, dest, along[0], along[2])


def regular(source: Ints, dest: Ints, length: Ints, stride: int) -> list[Regular]:
    """Rows as few regular ones, in the same order.

    Args:
        source: (n,), where each row begins in the source.
        dest: (n,), where it goes.
        length: (n,), its elements.
        stride: Of the destination along all rows.
    """
    found = list(_joined_rows(source, dest, length, stride))
    while len(joined := list(_joined(found))) < len(found):
        found = joined
    return found


def _joined_rows(source: Ints, dest: Ints, length: Ints, stride: int) -> Iterator[Regular]:
    for first, count, steps in _even(source, dest, length):
        form = _outside(count, steps, ((int(length[first]), 1, stride),))
        yield Regular(int(source[first]), int(dest[first]), form)


def _joined(items: Sequence[Regular]) -> Iterator[Regular]:
    numbers: dict[object, int] = {}
    form = np.array([numbers.setdefault(item.dims, len(numbers)) for item in items])
    source = np.array([item.source for item in items])
    dest = np.array([item.dest for item in items])
    for first, count, steps in _even(source, dest, form):
        item = items[first]
        yield Regular(item.source, item.dest, _outside(count, steps, item.dims))


def _even(source: Ints, dest: Ints, form: Ints) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Groups of neighbours of one form at even distances: the first, how many, and the distances."""
    if len(source) == 0:
        return
    step = np.stack([np.diff(source), np.diff(dest)], axis=1)
    alike = np.diff(form) == 0
    same = (step[1:] == step[:-1]).all(axis=1) & alike[1:] & alike[:-1]
    # Of stretches of equal steps: where each ends.
    ends = np.append(np.flatnonzero(~same), len(step) - 1) if len(step) else np.empty(0, int)
    first, total = 0, len(source)
    while first < total:
        if first == total - 1 or not alike[first]:
            yield first, 1, (0, 0)
            first += 1
            continue
        end = int(ends[np.searchsorted(ends, first)])
        count = end - first + 2
        yield first, count, (int(step[first, 0]), int(step[first, 1]))
        first += count


def _outside(count: int, steps: tuple[int, int], dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Dimensions with one more around them, or the outermost of them longer."""
    if count == 1:
        return dims
    outer, *inner = dims
    length, source, dest = outer
    if steps == (length * source, length * dest):
        return ((count * length, source, dest), *inner)
    return ((count, *steps), *dims)
