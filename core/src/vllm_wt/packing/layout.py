"""Where each tensor lies in one contiguous buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta

ALIGNMENT = 256
"""Bytes every tensor starts at a multiple of: enough for any dtype and for vector loads."""

_LEAST = 16
"""The least alignment: an element of the largest dtype, and what a GPU's widest load takes."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)
}


@dataclass(frozen=True)
class Slot:
    """One tensor's place: ``nbytes`` bytes from ``offset``."""

    tensor: TensorMeta
    offset: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True)
class Layout:
    """Places of all tensors of a manifest, in its order, aligned, without overlap.

    Args:
        manifest: The tensors.
        alignment: Bytes that each tensor starts at a multiple of: a power of two, 16 or more.

    Raises:
        InvalidInfo: The alignment is not one.
    """

    manifest: Manifest
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.alignment < _LEAST or self.alignment & (self.alignment - 1):
            raise InvalidInfo(
                "Tensors cannot be aligned like this",
                where="packing",
                expected=f"a power of two of at least {_LEAST} bytes",
                got=self.alignment,
                cure=f"leave it out: {ALIGNMENT} suits all",
            )

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        slots, offset = [], 0
        for tensor in self.manifest.tensors:
            slots.append(Slot(tensor, offset))
            offset += -(-tensor.nbytes // self.alignment) * self.alignment
        return tuple(slots)

    @cached_property
    def nbytes(self) -> int:
        """Size of the buffer, padding included; at least one byte."""
        last = self.slots[-1]
        return max(1, last.offset + last.nbytes)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as a view of ``buffer``, a contiguous uint8 tensor of :attr:`nbytes`."""
        for slot in self.slots:
            part = buffer[slot.offset : slot.offset + slot.nbytes]
            yield slot.tensor.name, view_as(part, slot.tensor)


def view_as(part: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A run of bytes as the tensor that ``meta`` describes, without a copy."""
    return part.view(DTYPES[meta.dtype]).view(meta.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes, without a copy; shape ``(nbytes,)``, dtype uint8."""
    # By strides: a contiguous tensor of one element may have any stride, which view(-1) keeps.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor (a DTensor by its global shape)."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
