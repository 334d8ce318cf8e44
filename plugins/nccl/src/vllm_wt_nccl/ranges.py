"""Which elements of a DTensor each rank holds, where those are one after another in the full tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

Range = tuple[int, int]
"""First element of the full tensor, and the one behind the last."""
Holders = Mapping[Range, tuple[int, ...]]
"""The ranks that hold each, as ``torch.distributed`` counts them; in order, all elements once."""


def holders(dtensor: Any) -> Holders | None:
    """Who holds what.

    Args:
        dtensor: A ``torch.distributed.tensor.DTensor``; nothing but its form is looked at.

    Returns:
        None where what a rank holds is not one run of elements, or no values: columns, strided shards,
        partial sums.
    """
    dim = _divided(dtensor)
    if dim is None:
        return None
    shape = tuple(dtensor.shape)
    step = math.prod(shape[dim + 1 :])
    mesh = dtensor.device_mesh.mesh
    found: dict[Range, list[int]] = {}
    for place in product(*map(range, mesh.shape)):
        start, rows = 0, math.prod(shape[: dim + 1])
        for placement, count, index in zip(dtensor.placements, mesh.shape, place, strict=True):
            if count > 1 and not placement.is_replicate():
                each = -(-rows // count)  # as torch.chunk cuts
                first = min(rows, index * each)
                start, rows = start + first, min(rows, first + each) - first
        if rows * step:
            part = (start * step, (start + rows) * step)
            found.setdefault(part, []).append(int(mesh[place]))
    return {part: tuple(found[part]) for part in sorted(found)}


def members(dtensor: Any) -> tuple[int, ...]:
    """The ranks that take part when it is gathered, or more."""
    return tuple(dtensor.device_mesh.mesh.flatten().tolist())


def _divided(dtensor: Any) -> int | None:
    """The dimension of which each rank has some rows; -1 where every rank has all; None otherwise."""
    from torch.distributed.tensor import Shard

    dims = set()
    for placement, count in zip(dtensor.placements, dtensor.device_mesh.mesh.shape, strict=True):
        if placement.is_partial():
            return None
        if count == 1 or placement.is_replicate():
            continue
        if type(placement) is not Shard:  # a strided one, which some releases derive from it
            return None
        dims.add(placement.dim % dtensor.dim())
    if len(dims) > 1:
        return None
    dim = next(iter(dims), -1)
    # Rows of a later dimension are apart in the tensor, unless all before it are of one element.
    return dim if math.prod(dtensor.shape[: max(dim, 0)]) == 1 else None
