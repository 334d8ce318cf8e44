"""Registered buffers of this side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_wt.errors import TransportError
from vllm_wt_ipc import BACKEND

KINDS = ("cpu", "cuda")
"""torch device types whose memory can be registered."""


@dataclass(eq=False)
class Region:
    """Buffers that were registered together; held until they are unregistered."""

    tensors: tuple[torch.Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """In bytes."""
        return [nbytes_of(tensor) for tensor in self.tensors]

    def release(self) -> None:
        """Hold nothing any more."""
        self.tensors = ()


def register(tensors: Sequence[torch.Tensor]) -> Region:
    """Check tensors and hold them.

    Raises:
        TransportError: One is empty, not contiguous, or on an unsupported device.
    """
    for index, tensor in enumerate(tensors):
        _check(index, tensor)
    return Region(tuple(tensors))


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; shape ``(nbytes,)``, dtype uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _check(index: int, tensor: torch.Tensor) -> None:
    if tensor.device.type not in KINDS:
        expected, got = f"memory of {' or '.join(KINDS)}", str(tensor.device)
    elif not tensor.is_contiguous():
        expected, got = "a contiguous tensor", f"strides {tensor.stride()}"
    elif not nbytes_of(tensor):
        expected, got = "at least 1 byte", f"shape {tuple(tensor.shape)}"
    else:
        return
    raise TransportError(
        f"Buffer {index} can't be registered",
        backend=BACKEND,
        where=f"buffer {index}",
        expected=expected,
        got=got,
        cure="register contiguous tensors that have elements, on a CPU or CUDA device",
    )
