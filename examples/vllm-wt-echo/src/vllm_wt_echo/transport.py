"""The Transport: what core calls, and what each call refuses."""

from __future__ import annotations

import ctypes
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import OutOfBounds, Revoked, TransportError, WrongOrder
from vllm_wt.transport import Copy, Progress, TransportProperties
from vllm_wt_echo.connections import OwnerEnd, ReaderEnd, make_socket
from vllm_wt_echo.info import EchoHandle, error

_OPEN_POLL_S = 0.0005
_MOST_STRANGERS = 64  # connections that have not said who is there; the oldest are closed
_KEPT_TICKETS = 8  # reports of older ones are of no use to anybody

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, eq=False)
class Region:
    """Memory that was registered together. It is kept by the transport, not by the views."""

    buffers: list[memoryview]


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies that were checked, by the connection that each comes over."""

    region: Region
    copies: dict[ReaderEnd, list[Copy]]
    nbytes: int


@dataclass(eq=False)
class Operation:
    """One pass over a plan. When all has landed, the owners are asked whether it was good."""

    plan: Plan
    confirming: bool = False
    done: bool = False


class EchoTransport:
    """One-sided reads over TCP on the loopback interface, one pass at a time.

    A pass that is given up leaves bytes on their way, so ``cancel`` closes the transport.
    """

    properties = TransportProperties(memory=frozenset({"cpu"}), max_descriptors=1 << 17)

    def __init__(self, name: str, device: torch.device) -> None:
        if not re.fullmatch(r"[\w.:-]{1,128}", name, re.ASCII):
            cure = "use at most 128 ASCII letters, digits and _.:-"
            raise error(TransportError, "The endpoint's name can't be used", got=name, cure=cure)
        self.name = name
        self._closed = False
        self._regions: dict[Region, list[torch.Tensor]] = {}
        # As owner:
        self._secret = secrets.token_bytes(16)
        self._listener: socket.socket | None = None  # once something has been exposed
        self._readers: list[OwnerEnd] = []
        self._exposed: dict[int, list[memoryview] | None] = {}  # None: revoked
        self._reports: dict[int, set[str]] = {}
        # As reader:
        self._owners: dict[str, ReaderEnd] = {}
        self._operation: Operation | None = None

    def register(self, buffers: Sequence[torch.Tensor]) -> Region:
        """Keep the buffers, and take note of where they are."""
        self._require_usable()
        region = Region([_memory_of(buffer) for buffer in buffers])
        self._regions[region] = list(buffers)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region: revoke what exposes it, give up the pass that writes to it."""
        self._require_region(region)
        for generation in [g for g, b in self._exposed.items() if b is region.buffers]:
            self.revoke(generation)
        del self._regions[region]
        if self._operation is not None and self._operation.plan.region is region:
            self.cancel(self._operation)

    def expose(self, region: Region, generation: int) -> bytes:
        """The handle of a region, for as long as the generation isn't revoked."""
        self._require_region(region)
        exposed = self._exposed.setdefault(generation, region.buffers)
        if exposed is not region.buffers:
            kind = Revoked if exposed is None else TransportError
            what = f"Generation {generation} was revoked, or names another region"
            raise error(kind, what, where="expose", cure="expose it as a new generation")
        if self._listener is None:
            self._listener = make_socket(listen=True)
        return EchoHandle(
            owner=self.name,
            generation=generation,
            port=self._listener.getsockname()[1],
            secret=self._secret.hex(),
            sizes=tuple(map(len, region.buffers)),
        ).to_bytes()

    def revoke(self, generation: int) -> None:
        """End what reads a generation; one that isn't exposed is left alone."""
        self._require_usable()
        if self._exposed.get(generation) is not None:
            self._exposed[generation] = None
            for reader in self._readers:
                if reader.generation == generation:
                    reader.revoke()

    def progress(self) -> None:
        """Take in new connections and move what the sockets take and have."""
        self._require_usable()
        if self._listener is None:
            return
        with suppress(OSError):  # nobody is waiting, or whoever was has gone
            for _ in range(_MOST_STRANGERS):
                sock, _address = self._listener.accept()
                sock.setblocking(False)
                self._readers.append(OwnerEnd(sock, self._secret, self._exposed, self._reports))
        for stranger in [r for r in self._readers if not r.reader][:-_MOST_STRANGERS]:
            stranger.sock.close()  # driving it fails
        for reader in tuple(self._readers):
            try:
                reader.drive()
            except OSError:  # it has gone, or is a stranger: no concern of the others
                reader.sock.close()
                self._readers.remove(reader)
        while len(self._reports) > _KEPT_TICKETS:
            del self._reports[min(self._reports)]

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket``, one of the latest few."""
        self._require_usable()
        return frozenset(self._reports.get(ticket, ()))

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner, and see that it exposes the generation."""
        self._require_usable()
        if owner in self._owners:
            cure = "read a new generation through a new transport"
            raise error(WrongOrder, f"Owner {owner!r} is open", where="open", cure=cure)
        checked = EchoHandle.from_bytes(handle, owner=owner, generation=generation)
        connection = ReaderEnd(checked, self.name)
        try:
            connection.confirm()
            while connection.awaited:
                deadline.check(f"Owner {owner!r} has not answered", where="open", got="no answer")
                connection.drive()
                deadline.wait(_OPEN_POLL_S)
        except BaseException:
            connection.sock.close()
            raise
        self._owners[owner] = connection

    def prepare(self, region: Region, copies: Sequence[Copy]) -> Plan:
        """Check a plan; nothing is moved yet."""
        self._require_region(region)
        targets = [len(buffer) for buffer in region.buffers]
        checked: dict[ReaderEnd, list[Copy]] = {}
        for copy in copies:
            owner = self._require_open(copy.owner)
            _require_inside("source", copy, copy.source, copy.source_offset, owner.sizes)
            _require_inside("target", copy, copy.target, copy.target_offset, targets)
            checked.setdefault(owner, []).append(copy)
        return Plan(region, checked, sum(copy.nbytes for copy in copies))

    def submit(self, plan: Plan) -> Operation:
        """Begin a pass over a plan; ``poll`` moves it."""
        self._require_region(plan.region)
        for owner in plan.copies:
            owner.require_up()
        if self._operation is not None and not self._operation.done:
            cure = "poll it to its end, or cancel it, before the next submit"
            raise error(WrongOrder, "A pass is under way", where="submit", cure=cure)
        for owner, copies in plan.copies.items():
            owner.read(copies, plan.region.buffers)
        self._operation = Operation(plan)
        return self._operation

    def poll(self, operation: Operation) -> Progress:
        """Move a pass on and say how far it is. When it raises, the pass has failed: cancel it."""
        self._require_usable()
        owners, nbytes = operation.plan.copies, operation.plan.nbytes
        if operation.done:
            return Progress(True, nbytes)
        for owner in owners:
            owner.drive()
        if not any(owner.awaited for owner in owners):
            operation.done = operation.confirming
            if not operation.confirming:
                operation.confirming = True
                for owner in owners:
                    owner.confirm()
        return Progress(operation.done, nbytes - sum(owner.missing for owner in owners))

    def cancel(self, operation: Operation) -> bool:
        """Give a pass up, and the transport with it. True: what writes is ``poll``, and it's over."""
        if not operation.done:
            self.close()
        return True

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``."""
        self._require_usable()
        self._require_open(owner).report(ticket)

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises."""
        self._closed = True
        for reader in self._readers:
            reader.sock.close()
        for owner in self._owners.values():
            owner.sock.close()
        if self._listener is not None:
            self._listener.close()
        self._regions.clear()

    def _require_usable(self) -> None:
        if self._closed:
            what = "The transport is closed, or spent by a pass that was given up"
            raise error(TransportError, what, cure="make a new one")

    def _require_region(self, region: Region) -> None:
        self._require_usable()
        if region not in self._regions:
            what = "The region is not registered with this transport"
            raise error(TransportError, what, cure="register its buffers first")

    def _require_open(self, owner: str) -> ReaderEnd:
        connection = self._owners.get(owner)
        if connection is None:
            raise error(WrongOrder, f"Owner {owner!r} is not open", cure="open its handle first")
        connection.require_up()
        return connection


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, which whoever holds the view must keep."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
        got = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        cure = "register contiguous tensors in host memory that have elements"
        what = "A buffer can't be registered"
        raise error(TransportError, what, where="register", got=got, cure=cure)
    # `tensor.numpy()` would bar trainers that put weights aside from ever resizing their storage.
    view: memoryview = _view_memory(tensor.data_ptr(), tensor.nbytes, 0x200)  # PyBUF_WRITE
    return view


def _require_inside(side: str, copy: Copy, index: int, offset: int, sizes: Sequence[int]) -> None:
    size = sizes[index] if 0 <= index < len(sizes) else 0
    if copy.nbytes < 1 or not 0 <= offset <= size - copy.nbytes:
        what = f"A copy from owner {copy.owner!r} leaves {side} buffer {index}"
        expected, got = f"1 to {size} bytes", f"{copy.nbytes} bytes from offset {offset}"
        cure = "both sides must describe the same tensors; connect again"
        raise error(OutOfBounds, what, where="prepare", expected=expected, got=got, cure=cure)
