"""Registered buffers of this side, and UCXX's view of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_wt.errors import TransportError
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.ucx.messages import Range

KINDS = frozenset({"cpu", "cuda"})
"""torch device types of memory that can be registered."""
_MOST_SPARE = 8
_WRITABLE = 0x200  # PyBUF_WRITE

# Both keep Python's lock: between two short copies it would be handed to another thread, and back.
_memmove = ctypes.pythonapi.memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


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

    def part(self, piece: Range) -> torch.Tensor:
        return self.buffers[piece.buffer][piece.offset : piece.offset + piece.nbytes]

    def address(self, piece: Range) -> int:
        return self._addresses[piece.buffer] + piece.offset

    def has(self, pieces: Iterable[Range]) -> bool:
        """Whether they are where they were registered: storage that was resized to nothing is not,
        and reading it would end the process."""
        return all(
            self.buffers[each.buffer].data_ptr() == self._addresses[each.buffer] for each in pieces
        )

    def forget(self) -> None:
        self.buffers = self.sizes = self._addresses = ()


class _CudaView:
    """Memory of a GPU as UCXX takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Spare:
    """Buffers that messages are gathered in, used again: new memory costs as much as a copy.

    Args:
        device: Where they are.
        nbytes: Of each.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of so many bytes, at most those of each; whatever is in it."""
        if not self._free:
            self._free.append(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))
        return self._free.pop()[:nbytes]

    def give_back(self, buffer: torch.Tensor) -> None:
        """One that nothing is written to or read from any more."""
        if len(self._free) < _MOST_SPARE:
            self._free.append(buffer.as_strided((self._nbytes,), (1,)))


def register(tensors: Sequence[torch.Tensor]) -> Region:
    """Take note of tensors.

    Raises:
        TransportError: One is empty, not contiguous, or on an unsupported device.
    """
    return Region(tuple(_flat(index, tensor) for index, tensor in enumerate(tensors)))


def view(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory, which whoever holds the view must keep."""
    # `tensor.numpy()` would bar trainers that put weights aside from ever resizing their storage.
    if tensor.device.type == "cpu":
        return _view_memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return _CudaView(tensor.data_ptr(), tensor.nbytes)


def gather(whole: torch.Tensor, region: Region, pieces: Sequence[Range]) -> None:
    """Copy pieces of a region into a buffer, one behind the other; all is there on return."""
    _copy(whole, region, pieces, into_region=False)


def scatter(whole: torch.Tensor, region: Region, pieces: Sequence[Range]) -> None:
    """Copy what is in a buffer to its places in a region; all is there on return."""
    _copy(whole, region, pieces, into_region=True)


def _copy(
    whole: torch.Tensor, region: Region, pieces: Sequence[Range], *, into_region: bool
) -> None:
    here, end = whole.data_ptr(), 0
    on_host = whole.device.type == "cpu"
    for each in pieces:
        if on_host and region.buffers[each.buffer].device.type == "cpu":
            # torch would do it by threads, which stall beside others that wait for a message.
            ours, its = here + end, region.address(each)
            _memmove(its if into_region else ours, ours if into_region else its, each.nbytes)
        else:
            mine, theirs = whole[end : end + each.nbytes], region.part(each)
            (theirs if into_region else mine).copy_(mine if into_region else theirs)
        end += each.nbytes
    for device in {whole.device, *(region.buffers[each.buffer].device for each in pieces)}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


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
