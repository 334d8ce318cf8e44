"""Which tensors are cut in the same way, so that geometry is done once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.patterns import Ints, numbered, numbered_lists


@dataclass(frozen=True)
class Signatures:
    """Rows grouped by tensor and box, and tensors by the boxes that they have.

    A *pair* is a tensor and a box that at least one row has of it; pairs are in ascending order of
    the tensor, then of the box.

    Args:
        box_start: (boxes, dims), each distinct box once, in the order of first occurrence.
        box_size: (boxes, dims).
        of_tensor: (tensors,), number of the tensor's signature.
        boxes: For each signature, the boxes of its tensors, ascending.
        pair_first: (tensors + 1,), the first pair of each tensor.
        row_first: (pairs + 1,), the first of each pair's rows in ``rows``.
        rows: By pair, then by rank; of a rank's equal rows the first only.
    """

    box_start: Ints
    box_size: Ints
    of_tensor: Ints
    boxes: tuple[Ints, ...]
    pair_first: Ints
    row_first: Ints
    rows: Ints

    @classmethod
    def of(
        cls,
        shapes: Ints,
        tensor: npt.NDArray[np.int32],
        rank: npt.NDArray[np.int32],
        start: Ints,
        size: Ints,
    ) -> Signatures:
        """Group the rows of a layout; the arguments are its columns."""
        box, firsts = numbered([*start.T, *size.T])
        rows = np.lexsort((rank, box, tensor))
        key = tensor[rows] * np.int64(max(1, len(firsts))) + box[rows]
        again = (np.diff(key, prepend=-1) == 0) & (np.diff(rank[rows], prepend=-1) == 0)
        rows, key = rows[~again], key[~again]
        row_first = np.append(np.flatnonzero(np.diff(key, prepend=-1)), len(key))
        pairs = rows[row_first[:-1]]
        pair_first = np.searchsorted(tensor[pairs], np.arange(len(shapes) + 1))
        lists, boxes = numbered_lists(box[pairs], pair_first)
        of_tensor, examples = numbered([lists, *shapes.T])
        own = tuple(boxes[i] for i in lists[examples].tolist())
        return cls(start[firsts], size[firsts], of_tensor, own, pair_first, row_first, rows)
