"""Registered buffers of this side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_wt.errors import ManifestMismatch, TransportError
from vllm_wt_nccl.p2p import BACKEND

KINDS = frozenset({"cpu", "cuda"})
"""torch device types of memory that can be registered."""


class Region:
    """Buffers that were registered together: uint8, of shape ``(nbytes,)``, none once it is
    unregistered.

    Attributes:
        sizes: Their lengths.
    """

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self.buffers = buffers
        self.sizes = tuple(buffer.numel() for buffer in buffers)
        self._addresses = tuple(buffer.data_ptr() for buffer in buffers)

    def part(self, buffer: int, offset: int, nbytes: int) -> torch.Tensor:
        """A run of bytes of one.

        Raises:
            ManifestMismatch: Its memory is not where it was registered: its storage was resized.
        """
        whole = self.buffers[buffer]
        if whole.data_ptr() != self._addresses[buffer]:
            raise lost_memory()
        return whole[offset : offset + nbytes]

    def forget(self) -> None:
        self.buffers = self.sizes = self._addresses = ()


def lost_memory() -> ManifestMismatch:
    """What is raised where memory that is registered has gone."""
    return ManifestMismatch(
        "Memory that is registered has been freed or resized",
        backend=BACKEND,
        where="read",
        expected="tensors that keep their memory until they are unregistered",
        cure="unregister it first; then register and expose what has come in its place",
    )


def register(tensors: Sequence[torch.Tensor]) -> Region:
    """Take note of tensors.

    Raises:
        TransportError: One is empty, not contiguous, or on an unsupported device.
    """
    return Region(tuple(_flat(index, tensor) for index, tensor in enumerate(tensors)))


def _flat(index: int, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type not in KINDS:
        expected, got = f"memory of {' or '.join(sorted(KINDS))}", str(tensor.device)
    elif not tensor.is_contiguous():
        expected, got = "a contiguous tensor", f"strides {tensor.stride()}"
    elif not tensor.nbytes:
        expected, got = "at least 1 byte", f"shape {tuple(tensor.shape)}"
    else:
        return tensor.detach().view(-1).view(torch.uint8)
    raise TransportError(
        f"Buffer {index} can't be registered",
        backend=BACKEND,
        where=f"buffer {index}",
        expected=expected,
        got=got,
        cure="see what was expected",
    )
