"""The Transport over UCXX."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from vllm_wt import bounds
from vllm_wt.deadline import Deadline
from vllm_wt.errors import Revoked, TransportError, WrongOrder
from vllm_wt.transport import Copy, Progress, TransportProperties
from vllm_wt_rdma import nixl
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.ucx import bindings, memory
from vllm_wt_rdma.ucx.batching import GATHER_BYTES, batch
from vllm_wt_rdma.ucx.exposures import Exposures
from vllm_wt_rdma.ucx.fabric import Fabric
from vllm_wt_rdma.ucx.info import UcxHandle, decode, encode_address
from vllm_wt_rdma.ucx.lifeline import this_host
from vllm_wt_rdma.ucx.memory import Region
from vllm_wt_rdma.ucx.messages import NAME
from vllm_wt_rdma.ucx.owner import Owner
from vllm_wt_rdma.ucx.reader import Connection, Operation, Plan, Tags


class UcxTransport:
    """Reads by UCX's tag messages: a reader asks, and the owner sends what it asks for.

    Nothing crosses unless the owner calls ``progress``. What UCX needs to listen on it chooses itself,
    by ``UCX_NET_DEVICES`` and ``UCX_TLS``.

    **Spent after a failure.** When ``cancel`` has to stop messages that don't come within moments, or
    a pass that has failed, the UCX worker is destroyed, since nothing less stops them for certain.
    From then on every call but ``close`` and ``cancel`` fails: make a new transport. A cancelled pass
    whose messages have come spends nothing; its plan can be submitted again.

    **Revoking** stops readers at once: the owner sends nothing more of that memory.

    Args:
        name: Name of this endpoint: ASCII letters, digits and ``_.:-``, at most 128.
        device: Where its buffers will live.

    Raises:
        BackendUnavailable: UCXX doesn't work here.
        TransportError: The name can't be used.
    """

    properties = TransportProperties(
        memory=memory.KINDS,
        alignment=1,
        owner_must_poll=True,
        thread_safe=False,
        can_cancel=True,
    )

    def __init__(self, name: str, device: torch.device) -> None:
        if not NAME.fullmatch(name):
            raise TransportError(
                "The endpoint's name can't be used",
                backend=BACKEND,
                expected=NAME.pattern,
                got=repr(name),
                cure="use letters, digits and the characters of the pattern",
            )
        self.name = name
        self._device = device
        self._threads = threading.local()
        self._use_device()
        self._fabric = Fabric()
        self._exposures = Exposures()
        self._owner = Owner(self._fabric, self._device, self._exposures)
        self._tags = Tags()
        self._spare = memory.Spare(self._device, GATHER_BYTES)
        self._regions: set[Region] = set()
        self._opened: dict[str, Connection] = {}
        self._running: list[Operation] = []

    @staticmethod
    def require() -> None:
        """See that UCXX is there.

        Raises:
            BackendUnavailable: It is not installed, or cannot be imported.
        """
        bindings.load()

    def register(self, buffers: Sequence[torch.Tensor]) -> Region:
        """Take note of contiguous, non-empty buffers; UCX maps them when they are first sent.

        Raises:
            TransportError: A buffer is empty, not contiguous, or on an unsupported device.
        """
        self._require_usable("register")
        region = memory.register(buffers)
        self._regions.add(region)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region: revoke what exposes it, give up the passes that write to it."""
        self._require_region(region, "unregister")
        self._exposures.revoke_region(region)
        self._owner.release(region)
        for operation in tuple(self._running):
            if operation.plan.region is region:
                self.cancel(operation)
        self._regions.remove(region)
        region.forget()

    def expose(self, region: Region, generation: int) -> bytes:
        """The handle of a region, as JSON; a generation always names the same region.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region.
        """
        self._require_region(region, "expose")
        exposure = self._exposures.expose(region, generation)
        address, digest = encode_address(self._fabric.address)
        return UcxHandle(
            ucxx=self._fabric.version,
            owner=self.name,
            generation=generation,
            nonce=exposure.nonce.hex(),
            sizes=region.sizes,
            address=address,
            digest=digest,
            lifeline=self._owner.lifeline,
            host=this_host(),
        ).to_bytes()

    def revoke(self, generation: int) -> None:
        """Send nothing more of a generation; one that isn't exposed is left alone."""
        self._require_usable("revoke")
        self._exposures.revoke(generation)

    def progress(self) -> None:
        """Connect peers, serve reads and collect notifications, for some milliseconds at most."""
        self._require_usable("progress")
        self._owner.serve()

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket``; the latest few tickets are kept."""
        self._require_usable("readers")
        return self._owner.tickets.readers(ticket)

    @property
    def garbage(self) -> int:
        """How many messages were none of ours, and dropped."""
        return self._owner.garbage

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner and have it say that its memory can be read.

        Raises:
            CorruptTransfer, InvalidInfo: The handle is refused; UCX has not seen it.
            WrongOrder: The owner is open.
            Revoked: The owner doesn't expose this generation any more.
            PeerDead: The owner is gone.
            Timeout: The owner doesn't poll or can't be reached.
        """
        self._require_usable("open")
        checked = decode(handle, owner=owner, generation=generation)
        if owner in self._opened:
            raise WrongOrder(
                f"Owner {owner!r} is open",
                backend=BACKEND,
                where="open",
                cure="read its new generation through a new transport",
            )
        connection = Connection(self._fabric, checked, self._tags)
        try:
            connection.greet(self.name, deadline, self._owner.step)
        except BaseException:
            connection.close()
            raise
        self._opened[owner] = connection

    def prepare(self, region: Region, copies: Sequence[Copy]) -> Plan:
        """Check a plan and make its messages; a pass makes none but those of that pass.

        Raises:
            Revoked: An owner of the plan isn't open.
            OutOfBounds: A copy leaves the memory of one side.
            TransportError: Too many copies, or a region that isn't registered.
        """
        self._require_region(region, "prepare")
        if len(copies) > self.properties.max_descriptors:
            raise TransportError(
                "The plan has too many copies",
                backend=BACKEND,
                where="prepare",
                expected=f"at most {self.properties.max_descriptors}",
                got=len(copies),
                cure="send fewer, larger tensors",
            )
        owners = {name: self._require_open(name) for name in dict.fromkeys(c.owner for c in copies)}
        sources = {name: connection.handle.sizes for name, connection in owners.items()}
        bounds.check_copies(copies, region.sizes, sources, backend=BACKEND)
        plan = Plan(region)
        for name, batches in batch(copies).items():
            plan.add(owners[name], batches)
        return plan

    def submit(self, plan: Plan) -> Operation:
        """Begin a pass over a plan; ``poll`` moves it.

        Raises:
            TransportError: The memory that it writes to is not registered any more.
            WrongOrder: The plan's last pass is still under way.
        """
        self._require_region(plan.region, "submit")
        if plan.busy:
            raise WrongOrder(
                "The plan's last pass is still under way",
                backend=BACKEND,
                where="submit",
                cure="poll it to its end, or cancel it, before the next submit",
            )
        operation = Operation(self._fabric, plan, self._tags, self._spare)
        self._running.append(operation)
        return operation

    def poll(self, operation: Operation) -> Progress:
        """Drive a pass for some milliseconds, and say how far it is.

        Raises:
            PeerDead, Revoked: The pass has failed; cancel it.
        """
        self._require_usable("poll")
        progress = operation.advance(self._owner.step)
        if progress.done and operation in self._running:
            self._running.remove(operation)
        return progress

    def cancel(self, operation: Operation) -> bool:
        """Give a pass up. True when nothing will write into its targets any more.

        What was asked for gets a moment to come. If it doesn't, or has failed, the UCX worker is
        destroyed and the transport is spent.
        """
        if operation in self._running:
            self._running.remove(operation)
        if operation.done:
            return True
        with suppress(Exception):
            self._use_device()
            if not self._fabric.destroyed and operation.give_up(self._owner.step):
                return True
        self._destroy()
        return True

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``.

        Raises:
            Revoked: The owner isn't open.
            PeerDead: It is gone.
        """
        self._require_usable("notify")
        self._require_open(owner).report(ticket, self._owner.step)

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises."""
        with suppress(Exception):
            self._destroy()

    def _destroy(self) -> None:
        """End the fabric and all that is made with it."""
        self._fabric.destroy()
        for connection in self._opened.values():
            connection.close()
        self._owner.close()
        self._opened.clear()
        self._regions.clear()
        self._running.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies that UCX has queued on the device

    def _use_device(self) -> None:
        """Make the device's CUDA context exist, and current on this thread; see `nixl.use_cuda`."""
        if self._device.type == "cuda" and not hasattr(self._threads, "ready"):
            if self._device.index is None:
                self._device = torch.device("cuda", torch.cuda.current_device())
            nixl.use_cuda(self._device)
            self._threads.ready = True

    def _require_usable(self, where: str) -> None:
        if self._fabric.destroyed:
            raise TransportError(
                "The transport is closed, or spent by a pass that was given up",
                backend=BACKEND,
                where=where,
                cure="make a new one",
            )
        self._use_device()

    def _require_region(self, region: Region, where: str) -> None:
        self._require_usable(where)
        if region not in self._regions:
            raise TransportError(
                "The region is not registered with this transport",
                backend=BACKEND,
                where=where,
                cure="register it with this transport first",
            )

    def _require_open(self, owner: str) -> Connection:
        connection = self._opened.get(owner)
        if connection is None:
            raise Revoked(
                f"Owner {owner!r} is not open",
                backend=BACKEND,
                expected=f"one of {', '.join(self._opened) or 'none'}",
                cure="open the owner's handle",
            )
        return connection
