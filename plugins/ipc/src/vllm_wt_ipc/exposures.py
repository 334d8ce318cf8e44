"""Which generations of an owner's memory readers may read, and where each of them lies."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_wt.errors import Revoked, TransportError
from vllm_wt_ipc import BACKEND, cuda, host, memory
from vllm_wt_ipc.control import ControlPage
from vllm_wt_ipc.info import Allocation, BufferInfo, IpcHandle
from vllm_wt_ipc.region import Region, nbytes_of

_SHARE = (
    "tensor.share_memory_() before it is exposed, with torch's sharing strategy at its default, "
    "file_descriptor; or memory of IpcTransport.allocate"
)
"""How host memory comes to be exposable."""


@dataclass(frozen=True)
class Exposure:
    """A generation that may be read.

    Args:
        region: Which memory.
        slot: Its word of the control page.
        handle: What readers need.
        descriptors: Of the control page and of the segments, in the handle's order.
    """

    region: Region
    slot: int
    handle: bytes
    descriptors: tuple[int, ...]


class Exposures:
    """Lights a word for each generation that is exposed, and puts it out.

    Args:
        name: The owner's.

    Attributes:
        nonce: What a reader must know.
        address: Name of the abstract Unix socket at which it says so.
    """

    def __init__(self, name: str) -> None:
        self.nonce = secrets.token_bytes(16)
        self.address = f"vllm-wt-ipc-{secrets.token_hex(16)}"
        self._name = name
        self._page: ControlPage | None = None
        self._exposed: dict[int, Exposure] = {}
        self._revoked: set[int] = set()

    def get(self, generation: int) -> Exposure | None:
        """What may be read of a generation."""
        return self._exposed.get(generation)

    def expose(self, region: Region, generation: int) -> bytes:
        """Expose a region, if it isn't yet, and say how to reach it; see :class:`IpcHandle`.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region, or memory that can't be shared.
        """
        if generation in self._revoked:
            raise Revoked(
                f"Generation {generation} was revoked",
                backend=BACKEND,
                where="expose",
                cure="expose the region as a new generation",
            )
        exposure = self._exposed.get(generation)
        if exposure is None:
            exposure = self._exposed[generation] = self._make(region, generation)
        elif exposure.region is not region:
            raise TransportError(
                f"Generation {generation} names another region",
                backend=BACKEND,
                where="expose",
                cure="expose the region as a new generation",
            )
        return exposure.handle

    def revoke(self, generation: int) -> None:
        """Put a generation's word out; one that isn't exposed is left alone."""
        exposure = self._exposed.pop(generation, None)
        if exposure is not None and self._page is not None:
            self._page.put_out(exposure.slot)
            self._revoked.add(generation)

    def revoke_region(self, region: Region) -> None:
        """Revoke every generation of a region."""
        for generation in [g for g, e in self._exposed.items() if e.region is region]:
            self.revoke(generation)

    def close(self) -> None:
        """Revoke all and let go of the control page."""
        for generation in tuple(self._exposed):
            self.revoke(generation)
        self._page = None

    def _make(self, region: Region, generation: int) -> Exposure:
        places = _Places()
        for index, tensor in enumerate(region.tensors):
            places.add(index, tensor)
        if self._page is None:
            self._page = ControlPage()
        slot, word = self._page.light()
        there = host.here()
        handle = IpcHandle(
            owner=self._name,
            generation=generation,
            boot=there.boot,
            network=there.network,
            address=self.address,
            nonce=self.nonce.hex(),
            slot=slot,
            word=word,
            gpu=places.gpu,
            segments=tuple(places.segments),
            allocations=tuple(places.allocations),
            buffers=tuple(places.buffers),
        )
        descriptors = (self._page.descriptor, *places.descriptors)
        return Exposure(region, slot, handle.to_bytes(), descriptors)


class _Places:
    """Where buffers lie; memory that several of them lie in is listed once.

    Attributes:
        buffers: In order.
        segments: Sizes of shared host memory.
        descriptors: Of the same.
        allocations: Of the GPU's memory.
        gpu: Which GPU; empty without such memory.
    """

    def __init__(self) -> None:
        self.buffers: list[BufferInfo] = []
        self.segments: list[int] = []
        self.descriptors: list[int] = []
        self.allocations: list[Allocation] = []
        self.gpu = ""
        self._known: dict[tuple[str, int], int] = {}

    def add(self, index: int, tensor: torch.Tensor) -> None:
        """Find where a buffer lies.

        Raises:
            TransportError: In memory that can't be shared, or on a second GPU.
        """
        kind: Literal["host", "cuda"]
        if tensor.is_cuda:
            kind, (base, size) = "cuda", self._cuda_memory(index, tensor)
        else:
            storage = tensor.untyped_storage()
            kind, base, size = "host", storage.data_ptr(), storage.nbytes()
        number = self._known.get((kind, base))
        if number is None:
            if kind == "cuda":
                number = len(self.allocations)
                handle = cuda.export(tensor.device, base)
                self.allocations.append(Allocation(handle=handle, nbytes=size))
            else:
                number = len(self.segments)
                self.descriptors.append(_descriptor(index, tensor))
                self.segments.append(size)
            self._known[kind, base] = number
        offset = tensor.data_ptr() - base
        self.buffers.append(
            BufferInfo(kind=kind, memory=number, offset=offset, nbytes=nbytes_of(tensor))
        )

    def _cuda_memory(self, index: int, tensor: torch.Tensor) -> tuple[int, int]:
        gpu = cuda.gpu_of(tensor.device)
        if self.gpu not in {"", gpu}:
            raise TransportError(
                f"Buffer {index} is on a second GPU",
                backend=BACKEND,
                where="expose",
                expected=self.gpu,
                got=gpu,
                cure="expose the memory of each GPU by a transport of its own",
            )
        self.gpu = gpu
        cuda.require_exportable(tensor)
        return cuda.allocation_of(tensor)


def _descriptor(index: int, tensor: torch.Tensor) -> int:
    descriptor = memory.descriptor_of(tensor)
    if descriptor is None:
        raise TransportError(
            f"Buffer {index} can't be exposed: other processes can't map its memory",
            backend=BACKEND,
            where="expose",
            expected="shared memory",
            got=f"private memory of {nbytes_of(tensor)} bytes",
            cure=_SHARE,
        )
    return descriptor
