"""Host memory that other processes can map: made here, found, mapped from a descriptor.

A map lives as long as the tensors over it, and has at most one descriptor: an `mmap.mmap` would keep
one of its own for each map.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

from vllm_wt.errors import CorruptTransfer, TransportError
from vllm_wt_ipc import BACKEND, room

_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK and F_SEAL_GROW: no reader gets a SIGBUS
_ADD_SEALS = 1033

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

_made: dict[int, int] = {}
"""Descriptors of the memory of :func:`make`, by its address."""


def make(nbytes: int) -> torch.Tensor:
    """Memory that can be shared: zeros, uint8, shape ``(nbytes,)``; it goes with the tensor.

    Raises:
        TransportError: There is not so much, or not so many descriptors.
    """
    if nbytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    descriptor = -1
    try:
        if (left := room.available()) < nbytes:
            raise _shortage(nbytes, f"{left} bytes to be had")
        descriptor = os.memfd_create("vllm-wt-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)  # all of it, now: no SIGBUS later
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        address, tensor = _tensor(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, descriptor)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _shortage(nbytes, error) from None
    _made[address] = descriptor
    return tensor


def descriptor_of(tensor: torch.Tensor) -> int | None:
    """Descriptor of the shared memory that a tensor lies in, which stays its owner's; None when it
    lies in other memory."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address in _made:
        return _made[address]
    # What torch shares by descriptor begins a page. Asking for the descriptor of what it shares by
    # name, 64 bytes behind that, would move the memory.
    if address and address % mmap.PAGESIZE == 0 and storage.is_shared():
        descriptor, _ = storage._share_fd_cpu_()
        return descriptor if descriptor >= 0 else None  # none: a file that torch has mapped
    return None


def map_shared(descriptor: int, nbytes: int, *, where: str) -> torch.Tensor:
    """The first bytes behind a peer's descriptor, to be read and not written; shape ``(nbytes,)``.

    Writing there ends the process: a reader that changes its owner's weights must not go unnoticed.

    Raises:
        CorruptTransfer: There is less behind it: reading on would be a SIGBUS.
        TransportError: It can't be mapped.
    """
    try:
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise CorruptTransfer(
                "A segment of the owner's is shorter than announced",
                backend=BACKEND,
                where=where,
                expected=f"{nbytes} bytes",
                got=size,
                cure="don't shrink shared memory that is exposed; connect again",
            )
        return _tensor(descriptor, nbytes, mmap.PROT_READ)[1]
    except OSError as error:
        raise TransportError(
            "The owner's memory can't be mapped",
            backend=BACKEND,
            where=where,
            expected=f"{nbytes} bytes",
            got=error,
            cure="raise the limit of address space (`ulimit -v`) or vm.max_map_count",
        ) from None


def _shortage(nbytes: int, got: object) -> TransportError:
    return TransportError(
        "Shared memory can't be had",
        backend=BACKEND,
        where="allocate",
        expected=f"{nbytes} bytes",
        got=got,
        cure="raise the container's memory limit; for too many open files, `ulimit -n`",
    )


def _tensor(
    descriptor: int, nbytes: int, protection: int, owned: int | None = None
) -> tuple[int, torch.Tensor]:
    """Map a descriptor; the map, and a descriptor that it owns, go with the tensor."""
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors may be used until the process has ended.
    weakref.finalize(memory, _unmap, address, nbytes, owned).atexit = False
    return address, torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(address: int, nbytes: int, owned: int | None) -> None:
    if owned is not None:
        _made.pop(address, None)  # before the address is given to somebody else
        os.close(owned)
    _libc.munmap(address, nbytes)
