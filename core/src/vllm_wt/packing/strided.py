"""The contiguous runs of a strided copy, as addresses."""

from __future__ import annotations

import math

import torch

_SHORTEST = 512
"""Bytes of the shortest run that is worth a program of its own on a GPU."""
_MOST = 1 << 18
"""Runs of the largest table that is made for one copy: 6 MiB."""


def runs_of(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """What is contiguous on both sides of a copy between tensors of the same shape and dtype.

    Returns:
        Addresses of both sides and lengths in bytes: shape ``(runs, 3)``, dtype int64. None where the
        runs are too short, or too many, to be copied one by one.
    """
    sizes = zip(to.stride(), source.stride(), to.shape, strict=True)
    dims = sorted(dim for dim in sizes if dim[2] != 1)
    inner = 1
    while dims and dims[0][:2] == (inner, inner):
        inner *= dims.pop(0)[2]
    itemsize = to.element_size()
    count = math.prod(size for _, _, size in dims)
    if inner * itemsize < _SHORTEST or not 0 < count <= _MOST:
        return None
    table = torch.empty(count, 3, dtype=torch.int64)
    for column, tensor in enumerate((to, source)):
        at = torch.zeros(1, dtype=torch.int64)
        for *strides, size in reversed(dims):
            at = (at.unsqueeze(-1) + torch.arange(size) * strides[column]).flatten()
        table[:, column] = at * itemsize + tensor.data_ptr()
    table[:, 2] = inner * itemsize
    return table
