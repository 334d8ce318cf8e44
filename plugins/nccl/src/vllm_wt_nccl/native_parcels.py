"""How tensors are put together for one broadcast. Both sides make it out from names, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import ALIGNMENT, Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Packing:
    """How a side packs.

    Args:
        packed: Whether several tensors may share a parcel.
        buffer_nbytes: Most bytes of such a parcel, unless it is one tensor. Alike on all sides.
        buffers: Of this side.
    """

    packed: bool
    buffer_nbytes: int
    buffers: int

    @property
    def limit(self) -> int:
        """What must be alike on all sides: bytes of a parcel, 0 where each tensor is one."""
        return self.buffer_nbytes if self.packed else 0


def parcels(
    items: Iterable[T], meta_of: Callable[[T], TensorMeta], packing: Packing
) -> Iterator[list[T]]:
    """The items in their order, as they go together; no more of them are taken than one parcel needs.

    Args:
        items: Tensors, or what stands for them.
        meta_of: Describes one.
        packing: How full a parcel gets.
    """
    parcel: list[T] = []
    nbytes = 0
    for item in items:
        padded = -(-meta_of(item).nbytes // ALIGNMENT) * ALIGNMENT
        if parcel and nbytes + padded > packing.limit:
            yield parcel
            parcel, nbytes = [], 0
        parcel.append(item)
        nbytes += padded
    if parcel:
        yield parcel


def layout_of(metas: Sequence[TensorMeta]) -> Layout:
    """Where the tensors of a parcel lie in it.

    Raises:
        ManifestMismatch: A name occurs twice.
    """
    return Layout(Manifest(tuple(metas)))


class Buffers:
    """Memory for parcels, used in turn and kept from one to the next.

    Args:
        count: How many.
        device: Where.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * count

    def take(self, number: int, nbytes: int) -> torch.Tensor:
        """Uint8, for a parcel of this number; whatever had it before must be done with it."""
        turn = number % self.count
        buffer = self._buffers[turn]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[turn] = buffer = None  # freed before there is a larger one
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[turn] = buffer
        return buffer[:nbytes]
