"""Which boxes of the checkpoint's tensors a worker needs, by what its load plan reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vllm_wt.loading.plan import Copy, LoadPlan
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.strides import rows_of

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index, and the index after the last, in each dimension."""


def needs_of(plan: LoadPlan, rank: int) -> Layout:
    """What a worker needs, at least: what is no box is taken with all between its corners.

    Args:
        plan: Of the full tensors.
        rank: The worker's, in the layout.
    """
    whole = {name for fallback in plan.fallbacks.values() for name in fallback.sources}
    reads: dict[str, dict[object, Copy]] = {}
    for copy in plan.copies:
        if copy.source not in whole and copy.numel:
            read = (copy.source_offset, copy.shape, copy.source_strides)
            reads.setdefault(copy.source, {})[read] = copy
    known: dict[object, list[_Box]] = {}  # a model's layers, and their experts, are alike

    def boxes() -> Iterator[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        for tensor in plan.manifest.tensors:
            if not tensor.nbytes:
                continue
            found: list[_Box] = []
            if tensor.name in whole:
                found = [((0,) * len(tensor.shape), tensor.shape)]
            elif tensor.name in reads:
                key = (tensor.shape, tuple(reads[tensor.name]))
                if key not in known:
                    each = (_box(copy, tensor.shape) for copy in reads[tensor.name].values())
                    known[key] = _apart(each)
                found = known[key]
            for start, end in found:
                size = tuple(last - first for first, last in zip(start, end, strict=True))
                yield tensor.name, rank, start, size

    return Layout.of(plan.manifest.tensors, boxes())


def _box(copy: Copy, shape: tuple[int, ...]) -> _Box:
    """The least box around what a copy reads of a contiguous tensor of this shape."""
    if not shape:
        return (), ()
    rows = rows_of(copy)
    first = np.stack(np.unravel_index(rows.source, shape))
    last = np.stack(np.unravel_index(rows.source + rows.length - 1, shape))
    # Where a row goes over an edge, it has all of the dimensions within that.
    over = np.cumsum(first != last, axis=0) - (first != last) > 0
    whole = np.array(shape)[:, None]
    first = np.where(over, 0, first)
    last = np.where(over, whole - 1, last)
    return tuple(first.min(axis=1).tolist()), tuple((last.max(axis=1) + 1).tolist())


def _apart(boxes: Iterable[_Box]) -> list[_Box]:
    """Boxes that do not overlap: those that do become the box around them."""
    found: list[_Box] = []
    for each in boxes:
        box = each
        while (other := next((one for one in found if _overlap(one, box)), None)) is not None:
            found.remove(other)
            box = (
                tuple(map(min, box[0], other[0])),
                tuple(map(max, box[1], other[1])),
            )
        found.append(box)
    return found


def _overlap(one: _Box, other: _Box) -> bool:
    return all(
        start < there_end and there < end
        for start, end, there, there_end in zip(*one, *other, strict=True)
    )
