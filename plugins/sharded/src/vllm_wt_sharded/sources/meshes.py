"""Which boxes of a full tensor one rank of a mesh holds, and its local memory as these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt_sharded.sources.base import Piece

Runs = list[tuple[int, int]]
"""Of one dimension: where runs of it start in the full tensor and how long they are, in the order in
which they lie in local memory."""


class Box(NamedTuple):
    """Something of a full tensor.

    Args:
        start: Its first index in each dimension of the full tensor.
        size: Its length in each.
        local: Its first index in each dimension of the local tensor.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]


def divided(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
) -> list[Runs]:
    """What one rank holds of each dimension of a tensor.

    torch's own helper tells the first offset only; FSDP2 over tensor parallelism may leave a rank with
    several runs.

    Args:
        shape: Of the full tensor.
        mesh_shape: How many ranks there are in each dimension of the mesh.
        placements: One for each of these, outermost first. One that has a ``dim`` cuts it as
            ``torch.chunk`` does; with a ``split_factor`` too, it first cuts it into so many parts, and
            each of them among the ranks (torch's ``_StridedShard``). Any other leaves all as it is.
        coordinate: Of this rank in the mesh.
    """
    dims: list[Runs] = [[(0, size)] for size in shape]
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            dims[dim] = _share(dims[dim], getattr(placement, "split_factor", 1), count, index)
    return dims


def pieces_of(name: str, local: torch.Tensor, dims: Sequence[Runs], *, where: str) -> list[Piece]:
    """A local tensor as boxes of the full one, which are views.

    Args:
        name: In the checkpoint.
        local: What this rank holds of it, runs of each dimension one after another.
        dims: As of :func:`divided`.
        where: Named in the error.

    Raises:
        ManifestMismatch: The local tensor has another shape.
    """
    expected = tuple(sum(length for _, length in runs) for runs in dims)
    # torch may keep an empty part in some other shape.
    if tuple(local.shape) != expected and (local.numel() or 0 not in expected):
        raise ManifestMismatch(
            f"This rank does not hold of tensor {name!r} what is said to be its part",
            where=where,
            expected=f"a local tensor of shape {list(expected)}",
            got=list(local.shape),
            cure="divide it as torch.chunk does: by distribute_tensor, say, or over a number of ranks "
            "that divides it evenly",
        )
    if 0 in expected:
        return []
    return [Piece(name, box.start, _at(local, box)) for box in _boxes(dims)]


def _share(runs: Runs, parts: int, count: int, index: int) -> Runs:
    length = sum(each for _, each in runs)
    kept: Runs = []
    for part in range(parts):
        first, size = _chunk(length, parts, part)
        offset, share = _chunk(size, count, index)
        kept += _cut(runs, first + offset, share)
    return _merged(kept)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """First index and length of one of so many chunks; those that ``torch.chunk`` leaves out are
    empty."""
    each = -(-length // count)
    first = min(length, index * each)
    return first, min(length, first + each) - first


def _cut(runs: Runs, first: int, length: int) -> Runs:
    """So many of the indices that runs hold, from one on."""
    found: Runs = []
    for start, size in runs:
        skipped = min(first, size)
        taken = min(size - skipped, length)
        if taken:
            found.append((start + skipped, taken))
        first -= skipped
        length -= taken
    return found


def _merged(runs: Runs) -> Runs:
    found: Runs = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _boxes(dims: Sequence[Runs]) -> Iterator[Box]:
    placed = [
        [
            (start, length, end - length)
            for (start, length), end in zip(runs, accumulate(n for _, n in runs), strict=True)
        ]
        for runs in dims
    ]
    for combined in product(*placed):
        start, size, local = zip(*combined, strict=True) if combined else ((), (), ())
        yield Box(start, size, local)


def _at(local: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (first, length) in enumerate(zip(box.local, box.size, strict=True)):
        local = local.narrow(dim, first, length)
    return local
