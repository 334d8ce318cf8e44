"""CUDA IPC by the driver's functions. The only module that imports cuda-bindings.

Nothing here depends on the order of streams between processes: an owner's writes are complete before
core tells readers of them, and a reader's copies are complete before their operation is done.
"""

from __future__ import annotations

import base64
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from vllm_wt.errors import BackendUnavailable, CorruptTransfer, TransportError
from vllm_wt_ipc import BACKEND
from vllm_wt_ipc.devices import normalised

NO_EXPANDABLE = (
    "run with PYTORCH_CUDA_ALLOC_CONF without expandable_segments:True and without "
    "backend:cudaMallocAsync (or torch.cuda.memory._set_allocator_settings"
    "('expandable_segments:False') before the weights are allocated)"
)
"""How memory comes to be exportable."""

_LAZY_PEER_ACCESS = 1
_threads = threading.local()


@lru_cache(maxsize=1)
def driver() -> Any:
    """The module of the driver's functions.

    Raises:
        BackendUnavailable: It can't be imported.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except Exception as error:  # a wheel that doesn't fit fails in many ways: OSError, ...
        raise BackendUnavailable(
            "cuda-bindings cannot be imported",
            backend=BACKEND,
            where="import",
            expected="cuda.bindings.driver",
            got=f"{type(error).__name__}: {error}",
            cure="pip install cuda-bindings, of the major release of torch's CUDA",
        ) from None


class _CallFailed(Exception):
    """A function of the driver's said no.

    Args:
        name: Of its result.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def indexed(device: torch.device) -> torch.device:
    """The device with its index."""
    if device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a device's context exist, and current on this thread, for a while."""
    with torch.cuda.device(device):
        ready = _threads.__dict__.setdefault("ready", set())
        if device not in ready:
            torch.zeros(1, device=device)  # a new thread has no context before its first kernel
            ready.add(device)
        yield


def gpu_of(device: torch.device) -> str:
    """UUID of a device, normalised; of the instance, on a GPU that is partitioned."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    module = driver()
    name = "cuDeviceGetUuid_v2" if hasattr(module, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    with _typed(name):
        (number,) = _call("cuDeviceGet", device.index)
        (found,) = _call(name, number)
    return normalised(bytes(found.bytes))


def visible() -> dict[int, str]:
    """UUIDs of the devices of this process."""
    return {
        index: gpu_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())
    }


def require_exportable(tensor: torch.Tensor) -> None:
    """Refuse a tensor in an allocation that CUDA IPC doesn't take.

    Raises:
        TransportError: It is of the allocator's expandable segments, or of cudaMallocAsync.
    """
    attribute = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    with current(tensor.device), _typed("cuPointerGetAttribute"):
        (capable,) = _call("cuPointerGetAttribute", attribute, tensor.data_ptr())
    if not int(capable):
        raise TransportError(
            "GPU memory can't be exposed: CUDA IPC doesn't take what the allocator has made",
            backend=BACKEND,
            where="expose",
            expected="memory of cudaMalloc",
            got="expandable segments, or the backend cudaMallocAsync",
            cure=NO_EXPANDABLE,
        )


def allocation_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size of the allocation that a tensor lies in."""
    with current(tensor.device), _typed("cuMemGetAddressRange"):
        base, size = _call("cuMemGetAddressRange", tensor.data_ptr())
    return int(base), int(size)


def export(device: torch.device, base: int) -> str:
    """The handle of an allocation, in base64."""
    with current(device), _typed("cuIpcGetMemHandle", cure=NO_EXPANDABLE):
        (handle,) = _call("cuIpcGetMemHandle", base)
    return base64.b64encode(bytes(handle.reserved)).decode()


class Imports:
    """Allocations of other processes that are open here, each once.

    Args:
        device: Whose memory they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pointers: dict[bytes, int] = {}

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """The memory behind a handle: uint8, shape ``(nbytes,)``; the tensor keeps nothing open.

        Raises:
            TransportError: CUDA refuses the handle.
            CorruptTransfer: There is less behind it.
        """
        with current(self._device), _typed("cuMemGetAddressRange"):
            pointer = self._pointers.get(handle)
            if pointer is None:
                pointer = self._pointers[handle] = _open(handle)
            _, size = _call("cuMemGetAddressRange", pointer)
            if int(size) < nbytes:
                raise CorruptTransfer(
                    "An allocation of the owner's is smaller than announced",
                    backend=BACKEND,
                    where="open",
                    expected=f"{nbytes} bytes",
                    got=int(size),
                    cure="connect again",
                )
            return torch.as_tensor(_RawMemory(pointer, nbytes), device=self._device)

    def close(self) -> None:
        """Give everything back, never raising; nothing may be reading it any more."""
        if not self._pointers:
            return
        with suppress(Exception), current(self._device):
            while self._pointers:
                with suppress(_CallFailed):
                    _call("cuIpcCloseMemHandle", self._pointers.popitem()[1])


def _open(handle: bytes) -> int:
    opaque = driver().CUipcMemHandle()
    opaque.reserved = handle
    try:
        (pointer,) = _call("cuIpcOpenMemHandle", opaque, _LAZY_PEER_ACCESS)
    except _CallFailed as error:
        if error.name == "CUDA_ERROR_INVALID_CONTEXT":
            what, cure = "Owner and reader are one process", "make the reader in another process"
        else:
            what = "The GPU memory of the owner can't be opened"
            cure = (
                "if the owner lives and has not freed it, it is in another container: give both "
                "the IPC and PID namespaces of the host (docker run --ipc=host --pid=host)"
            )
        raise TransportError(
            what, backend=BACKEND, where="cuIpcOpenMemHandle", got=error.name, cure=cure
        ) from None
    return int(pointer)


class _RawMemory:
    """What torch makes a tensor of, without owning the memory."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    module = driver()
    result, *values = getattr(module, name)(*arguments)
    if result != module.CUresult.CUDA_SUCCESS:
        raise _CallFailed(getattr(result, "name", str(result)))
    return tuple(values)


@contextmanager
def _typed(where: str, *, cure: str = "see what the CUDA driver says") -> Iterator[None]:
    """Turns what the driver's functions say into our errors."""
    try:
        yield
    except _CallFailed as error:
        raise TransportError(
            "The CUDA driver refused", backend=BACKEND, where=where, got=error.name, cure=cure
        ) from None
