"""Registered buffers of this side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_wt.errors import TransportError
from vllm_wt_rdma import info
from vllm_wt_rdma.endpoint import Endpoint, Row
from vllm_wt_rdma.info import BufferInfo, MemoryKind
from vllm_wt_rdma.nixl import BACKEND

KINDS: dict[str, MemoryKind] = {"cpu": "DRAM", "cuda": "VRAM"}
"""What NIXL calls the memory of a torch device type."""


@dataclass(eq=False)
class Region:
    """Buffers that were registered together.

    Args:
        buffers: In the order in which they were given.
        registrations: Their numbers at the endpoint, one for each kind of memory.
    """

    buffers: tuple[BufferInfo, ...]
    registrations: list[int] = field(default_factory=list)


def register(endpoint: Endpoint, tensors: Sequence[torch.Tensor]) -> Region:
    """Register tensors, in one call a kind of memory; long ones as several pieces.

    Raises:
        TransportError: One is empty, not contiguous, or on an unsupported device.
    """
    region = Region(tuple(_describe(index, tensor) for index, tensor in enumerate(tensors)))
    try:
        for kind in sorted({buffer.kind for buffer in region.buffers}):
            rows = [row for b in region.buffers if b.kind == kind for row in _pieces(b)]
            region.registrations.append(endpoint.register(kind, rows, tensors))
    except BaseException:
        deregister(endpoint, region)
        raise
    return region


def deregister(endpoint: Endpoint, region: Region) -> None:
    """Forget a region's memory."""
    while region.registrations:
        endpoint.deregister(region.registrations.pop())


def _pieces(buffer: BufferInfo) -> list[Row]:
    piece = info.PIECE_BYTES
    return [
        (buffer.address + start, min(piece, buffer.nbytes - start), buffer.device)
        for start in range(0, buffer.nbytes, piece)
    ]


def _describe(index: int, tensor: torch.Tensor) -> BufferInfo:
    nbytes = tensor.numel() * tensor.element_size()
    kind = KINDS.get(tensor.device.type)
    if kind is None:
        expected, got = f"memory of {' or '.join(KINDS)}", str(tensor.device)
    elif not tensor.is_contiguous():
        expected, got = "a contiguous tensor", f"strides {tensor.stride()}"
    elif not nbytes:
        expected, got = "at least 1 byte", f"shape {tuple(tensor.shape)}"
    else:
        return BufferInfo(
            address=tensor.data_ptr(), nbytes=nbytes, device=tensor.device.index or 0, kind=kind
        )
    raise TransportError(
        f"Buffer {index} can't be registered",
        backend=BACKEND,
        where=f"buffer {index}",
        expected=expected,
        got=got,
        cure="see what was expected; pinned memory may be limited (`ulimit -l`)",
    )
