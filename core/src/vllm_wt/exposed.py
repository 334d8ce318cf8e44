"""The trainer's tensors while readers may read them: where they are, and whether they have stayed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.loading.regions import extent
from vllm_wt.manifest import TensorMeta
from vllm_wt.packing import as_bytes, meta_of
from vllm_wt.packing.places import are_at, places_of


class Exposed:
    """Tensors that readers may read, and where they were when they were exposed.

    Looked at several times a round: nothing here is done in Python for each of them.

    Args:
        buffers: Contiguous tensors.

    Attributes:
        memory: Their bytes. Keeps the memory from being freed under a reader, and from being given
            to another tensor, when a buffer gets other storage.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = list(buffers)
        self.memory = [as_bytes(buffer) for buffer in self.buffers]
        self._places = places_of(self.buffers)
        self._storages = [memory.untyped_storage() for memory in self.memory]
        self._needed = [int(m.storage_offset()) + m.numel() for m in self.memory]
        # Autograd counts how often a tensor was written to, but not one of inference.
        self._counted = [buffer for buffer in self.buffers if not buffer.is_inference()]
        self.look()

    def look(self) -> None:
        """What has been written to the buffers until now is no change."""
        self._writes = [buffer._version for buffer in self._counted]

    def has_same_memory(self, other: Exposed) -> bool:
        """Whether what was registered is what would be; memory that was freed is other memory, even
        where the allocator has given out the same address again."""
        still = are_at(self.memory, self._places) and self._has_memory
        return still and self._places == other._places

    def require_kept(self, cure: str) -> None:
        """See that nothing was freed, moved or written to.

        Raises:
            ManifestMismatch: Something was; ``cure`` says what to do.
        """
        if not self.in_place:
            raise ManifestMismatch(
                "A tensor was freed or resized while the workers were reading it",
                where=_title(self.buffers, map(self._is_in_place, range(len(self.buffers)))),
                expected="memory that stays until push returns",
                got="other memory, or none",
                cure=f"let push return before memory is freed or resized; {cure}",
            )
        writes = [buffer._version for buffer in self._counted]
        if writes != self._writes:
            raise ManifestMismatch(
                "A tensor was written to while the workers were reading it",
                where=_title(self._counted, map(operator.eq, writes, self._writes)),
                expected="values that stay until push returns",
                got="a change in place",
                cure=f"let push return before the next training step; {cure}",
            )

    @property
    def in_place(self) -> bool:
        """Whether the buffers are where they were, with their memory."""
        return are_at(self.buffers, self._places) and self._has_memory

    @property
    def _has_memory(self) -> bool:
        """Whether no storage that was exposed has been freed or cut since."""
        sizes = map(torch.UntypedStorage.nbytes, self._storages)
        return all(map(operator.ge, sizes, self._needed))

    def _is_in_place(self, index: int) -> bool:
        place = self.buffers[index].data_ptr() == self._places[index]
        return place and self._storages[index].nbytes() >= self._needed[index]


def _title(buffers: list[torch.Tensor], are_right: Iterable[bool]) -> str:
    """Of the first that is not."""
    for buffer, is_right in zip(buffers, are_right, strict=True):
        if not is_right:
            return f"a tensor of {buffer.dtype} {list(buffer.shape)}"
    return "one that has just come back"


def placed(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Where tensors are, and in which form: addresses, shapes, strides and dtypes."""
    looks = (torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride)
    dtypes = list(map(operator.attrgetter("dtype"), tensors))
    return (*(list(map(look, tensors)) for look in looks), dtypes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values, in order; torch negates and conjugates lazily."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage still reaches to its last element; ``resize_(0)`` frees it unseen."""
    end = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def require_memory(name: str, tensor: torch.Tensor) -> None:
    if not _has_memory(tensor):
        raise ManifestMismatch(
            f"The memory of tensor {name!r} has been freed or resized",
            where="source",
            expected=f"{tensor.numel() * tensor.element_size()} bytes",
            got=f"a storage of {tensor.untyped_storage().nbytes()} bytes",
            cure="push while its weights are in memory (an offloaded or resharded module has none)",
        )


def require_as_announced(metas: Mapping[str, TensorMeta], name: str, tensor: torch.Tensor) -> None:
    """A source is the user's own code, and its tensors need not be what its manifest says.

    Raises:
        ManifestMismatch: This one is not.
    """
    got, expected = meta_of(name, tensor), metas[name]
    if got != expected:
        raise ManifestMismatch(
            f"Tensor {name!r} is not what the source's manifest says",
            where="source",
            expected=f"{expected.dtype} {list(expected.shape)}",
            got=f"{got.dtype} {list(got.shape)}",
            cure="let the source's manifest and its tensors agree",
        )


def require_one_device(buffers: list[torch.Tensor], device: torch.device) -> None:
    devices = sorted({str(device), *(str(buffer.device) for buffer in buffers)})
    if len(devices) > 1:
        raise ManifestMismatch(
            "The tensors of one trainer rank are on several devices",
            where="source",
            expected="one device",
            got=", ".join(devices),
            cure="move them to one device, or run one trainer rank a device",
        )
