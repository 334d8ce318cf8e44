"""Whether every element of every tensor has an owner."""

from __future__ import annotations

import numpy as np

from vllm_wt_sharded.boxes import Ints, cells
from vllm_wt_sharded.signatures import Signatures


def first_orphan(shapes: Ints, signatures: Signatures) -> tuple[int, Ints, Ints] | None:
    """The first tensor with an element in no box that is held: its index, and the box's start and size.

    Args:
        shapes: (tensors, dims), full shapes; with a dimension of 0 there is nothing to hold.
        signatures: What is held of them.
    """
    _, firsts = np.unique(signatures.of_tensor, return_index=True)
    for first in np.sort(firsts).tolist():
        own = signatures.boxes[signatures.of_tensor[first]]
        whole = cells(
            np.zeros_like(shapes[first]),
            shapes[first],
            signatures.box_start[own],
            signatures.box_size[own],
        )
        for i, cover in enumerate(whole.covers):
            if not cover:
                return first, whole.start[i], whole.size[i]
    return None
