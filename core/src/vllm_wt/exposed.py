"""The trainer's tensors while readers may read them: where they are, and whether they have stayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.loading.regions import extent
from vllm_wt.packing import as_bytes


@dataclass(frozen=True, eq=False)
class Exposed:
    """A tensor that readers may read, and where it was when it was exposed.

    Args:
        buffer: The tensor, contiguous.
        memory: Its bytes. Keeps the memory from being freed under a reader, and from being given
            to another tensor, when the buffer gets other storage.
        place: Its address then.
        writes: What `writes_to` said then.
    """

    buffer: torch.Tensor
    memory: torch.Tensor
    place: int
    writes: int | None
    _storage: torch.UntypedStorage
    _needed: int
    """Bytes of the storage that the tensor reaches to."""

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Exposed:
        memory = as_bytes(buffer)
        needed = int(memory.storage_offset()) + memory.numel()
        place = buffer.data_ptr()
        return cls(buffer, memory, place, writes_to(buffer), memory.untyped_storage(), needed)

    @property
    def in_place(self) -> bool:
        return self.buffer.data_ptr() == self.place and self.has_memory

    @property
    def has_memory(self) -> bool:
        """Whether the storage that was exposed has not been freed or cut since."""
        return self._storage.nbytes() >= self._needed

    @property
    def title(self) -> str:
        return f"a tensor of {self.buffer.dtype} {list(self.buffer.shape)}"


def same_memory(former: list[Exposed], now: list[Exposed]) -> bool:
    """Whether what was registered is what would be; memory that was freed is other memory, even
    where the allocator has given out the same address again."""
    return [exposed.place for exposed in former] == [exposed.place for exposed in now] and all(
        exposed.memory.data_ptr() == exposed.place and exposed.has_memory for exposed in former
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its values, in order; torch negates and conjugates lazily."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage still reaches to its last element; ``resize_(0)`` frees it unseen."""
    end = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def writes_to(tensor: torch.Tensor) -> int | None:
    """How often autograd says that it was written to; it does not count tensors of inference."""
    return None if tensor.is_inference() else tensor._version


def require_memory(name: str, tensor: torch.Tensor) -> None:
    if not _has_memory(tensor):
        raise ManifestMismatch(
            f"The memory of tensor {name!r} has been freed or resized",
            where="source",
            expected=f"{tensor.numel() * tensor.element_size()} bytes",
            got=f"a storage of {tensor.untyped_storage().nbytes()} bytes",
            cure="push while its weights are in memory (an offloaded or resharded module has none)",
        )


def require_one_device(buffers: list[torch.Tensor]) -> None:
    devices = sorted({str(buffer.device) for buffer in buffers})
    if len(devices) > 1:
        raise ManifestMismatch(
            "The tensors of one trainer rank are on several devices",
            where="source",
            expected="one device",
            got=", ".join(devices),
            cure="move them to one device, or run one trainer rank a device",
        )
