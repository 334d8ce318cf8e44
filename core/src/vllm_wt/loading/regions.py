"""Arithmetic of strided regions, in elements: loops that copy them, runs of memory that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

Loop = tuple[int, int, int]
"""How often, and by how many elements the reading and the writing side advance each time."""

Dim = tuple[int, int]
"""A size and a stride: one dimension of a region of which only one side matters."""

_FEW = 1 << 10
"""Up to this many runs plain Python is faster than tensors."""

_MAX_RUNS = 1 << 22
"""A region of more runs counts as everything between its ends: a list of them costs too much."""


def coalesced(loops: Iterable[Loop]) -> tuple[Loop, ...]:
    """The fewest loops that copy the same elements, outermost first on the writing side."""
    result: list[Loop] = []
    for loop in sorted((loop for loop in loops if loop[0] != 1), key=_outermost):
        count, read, write = loop
        if result:
            outer, outer_read, outer_write = result[-1]
            if outer_read == count * read and outer_write == count * write:
                result[-1] = (outer * count, read, write)
                continue
        result.append(loop)
    return tuple(result)


def dims(shape: Sequence[int], strides: Sequence[int]) -> list[Dim]:
    return list(zip(shape, strides, strict=True))


def extent(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from a region's first to behind its last."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def _outermost(loop: Loop) -> tuple[int, int]:
    return -loop[2], -loop[1]


def runs(offset: int, dims: Iterable[Dim]) -> tuple[torch.Tensor | list[int], int]:
    """The contiguous runs of a region.

    Args:
        offset: Its first element.
        dims: Its dimensions; strides are not negative.

    Returns:
        Where each run starts, unsorted, and the length of all of them. Together they hold every
        element of the region; more than that only where there are more than 2**22 of them.
    """
    outer: list[Dim] = []
    length = 1
    for count, stride in sorted((d for d in dims if d[0] > 1 and d[1]), key=lambda d: d[1]):
        if not outer and stride <= length:
            length += (count - 1) * stride
        else:
            outer.append((count, stride))
    count = math.prod(count for count, _ in outer)
    if count > _MAX_RUNS:
        return [offset], length + sum((count - 1) * stride for count, stride in outer)
    if count <= _FEW:
        few = [offset]
        for count, stride in outer:
            few = [start + n * stride for n in range(count) for start in few]
        return few, length
    starts = torch.tensor([offset], device="cpu")
    for count, stride in outer:
        starts = (torch.arange(count, device="cpu").unsqueeze(1) * stride + starts).flatten()
    return starts, length


def union(
    regions: Sequence[tuple[torch.Tensor | list[int], int]], gap: int = 0
) -> list[tuple[int, int]]:
    """Merge runs as :func:`runs` gives them.

    Args:
        regions: Starts and length of each.
        gap: Runs with no more elements than this between them become one.

    Returns:
        Starts and ends, sorted, apart from each other by more than ``gap``.
    """
    if sum(len(starts) for starts, _ in regions) <= _FEW:
        joined: list[tuple[int, int]] = []
        for start, end in sorted(
            (int(start), int(start) + length) for starts, length in regions for start in starts
        ):
            if joined and start <= joined[-1][1] + gap:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((start, end))
        return joined
    with torch.inference_mode():
        each = [(torch.as_tensor(starts, device="cpu"), length) for starts, length in regions]
        starts, order = torch.cat([starts for starts, _ in each]).sort()
        ends = torch.cat([starts + length for starts, length in each])[order].cummax(0).values
        first = torch.ones_like(starts, dtype=torch.bool)
        first[1:] = starts[1:] > ends[:-1] + gap
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))


def covered(regions: Sequence[tuple[int, Sequence[Dim]]]) -> int:
    """How many distinct elements regions (offset, dimensions) hold together."""
    return sum(end - start for start, end in union([runs(*region) for region in regions]))


def overlap(first: Sequence[tuple[int, Sequence[Dim]]], second: tuple[int, Sequence[Dim]]) -> bool:
    """Whether a region shares an element with any of the others."""
    if not first:
        return False
    return covered([*first, second]) < covered(first) + covered([second])


def progressions(index: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """An index as first element, step and count of arithmetic progressions; no step is negative."""
    at = 0
    while at < len(index):
        count, step = 1, 1
        if at + 1 < len(index) and (step := index[at + 1] - index[at]) >= 0:
            count = 2
            while at + count < len(index) and index[at + count] - index[at + count - 1] == step:
                count += 1
        yield index[at], max(step, 0) if count > 1 else 1, count
        at += count
