"""How much a worker reads of each rank for what it takes: whole blocks, and what lies between."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import numpy as np

from vllm_wt.digests import BLOCK
from vllm_wt.loading.plan import Copy, LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.plan import Rows

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index in a piece, and size."""


def reads_of(source: Layout, rows: Rows, *, full: Collection[str], gap: int) -> tuple[Ints, Ints]:
    """What one worker reads of the pieces that ranks have, with ``verify="digest"``.

    Where it needs less than what it takes, because that is no box, it may read a little less.

    Args:
        source: What the ranks hold.
        rows: What the worker takes.
        full: Names of tensors that it puts together: pieces of them are read as a whole.
        gap: Bytes that are better read too much than left out by one more read.

    Returns:
        (ranks,) reads, and (ranks,) their bytes.
    """
    taken: dict[int, list[_Box]] = {}
    starts = rows.start - source.start[rows.source_row]
    for row, start, size in zip(
        rows.source_row.tolist(), starts.tolist(), rows.size.tolist(), strict=True
    ):
        taken.setdefault(row, []).append((tuple(start), tuple(size)))
    reads = np.zeros((2, source.ranks), dtype=np.int64)
    known: dict[object, tuple[int, int]] = {}  # a model's layers, and their experts, are alike
    for row, boxes in taken.items():
        meta = source.tensors[source.tensor[row]]
        piece = TensorMeta("piece", meta.dtype, tuple(source.size[row].tolist()))
        if meta.name in full:
            found = 1, piece.nbytes
        else:
            key = (piece, tuple(boxes))
            if key not in known:
                known[key] = _read(piece, boxes, gap)
            found = known[key]
        reads[:, source.rank[row]] += found
    return reads[0], reads[1]


def _read(piece: TensorMeta, boxes: list[_Box], gap: int) -> tuple[int, int]:
    """How many reads of how many bytes boxes of a piece take, by core's own rules."""
    strides = [*accumulate(reversed(piece.shape[1:]), int.__mul__, initial=1)][::-1]
    copies = tuple(
        Copy(
            source=piece.name,
            source_offset=sum(map(int.__mul__, start, strides)),
            source_strides=tuple(strides),
            casts=(),
            module="",
            parameter="",
            dest_offset=0,
            dest_strides=tuple(strides),
            dest_dtype=piece.dtype,
            shape=size,
        )
        for start, size in boxes
    )
    runs = LoadPlan(Manifest((piece,)), copies, (), {}, {}, ()).needed(piece.name, gap, BLOCK).runs
    return len(runs), sum(length for _, length in runs)
