"""The Transport between pairs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from vllm_wt import bounds
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    BackendUnavailable,
    Revoked,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.transport import Copy, Progress, TransportProperties
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.batching import bucketed
from vllm_wt_nccl.p2p.connection import Connection
from vllm_wt_nccl.p2p.exposures import Exposures
from vllm_wt_nccl.p2p.info import P2pHandle, decode, this_host
from vllm_wt_nccl.p2p.messages import MAX_ROWS, NAME
from vllm_wt_nccl.p2p.owner import Owner
from vllm_wt_nccl.p2p.reader import Operation, Plan
from vllm_wt_nccl.p2p.regions import KINDS, Region, register
from vllm_wt_nccl.p2p.slots import Work
from vllm_wt_nccl.p2p.turns import Turns

_MOST_COPIES = MAX_ROWS // 2
"""Of a plan; the ends of buckets cut some."""


class P2pTransport:
    """Reads by messages between an owner and a reader, which asks for them: NCCL carries them between
    GPUs, gloo in all other cases, also where both sides share a GPU.

    Nothing crosses unless the owner calls ``progress``.

    **Nothing writes late.** The fabric knows slots of its own alone, which buckets are packed into and
    put in their places from by this process. So ``cancel`` is always certain, and the transport can be
    used on: what the owner had begun to send is received, and left, before the next pass. (Of an owner
    that is stopped NCCL would wait for it on the GPU, so there the transport is spent: every call but
    ``close`` and ``cancel`` fails.)

    **Revoking** stops readers at once: the owner sends nothing more of that memory.

    Args:
        name: Name of this endpoint: ASCII letters, digits and ``_.:-``, at most 128.
        device: Where its buffers will live.

    Raises:
        BackendUnavailable: NCCL's binding is missing, and the device is a GPU.
        TransportError: The name can't be used.
    """

    properties = TransportProperties(
        memory=KINDS,
        alignment=1,
        max_descriptors=_MOST_COPIES,
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
        self._gpu = ""
        if device.type == "cuda":
            _require_nccl()
            device = torch.device("cuda", _index(device))
            self._gpu = _identity(device)
        self.name = name
        self._device = device
        self._is_closed = False
        self._exposures = Exposures()
        self._owner = Owner(device, self._exposures)
        self._work = Work(device)
        self._turns = Turns()
        self._regions: set[Region] = set()
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._opened: dict[str, Connection] = {}
        self._running: list[Operation] = []

    @staticmethod
    def require() -> None:
        """See that what this host needs is there: NCCL's binding, where it has GPUs.

        Raises:
            BackendUnavailable: It is not installed.
        """
        if torch.cuda.is_available():
            _require_nccl()

    def register(self, buffers: Sequence[torch.Tensor]) -> Region:
        """Take note of contiguous, non-empty buffers.

        Raises:
            TransportError: A buffer is empty, not contiguous, or on an unsupported device.
        """
        self._require_usable("register")
        region = register(buffers)
        self._regions.add(region)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region: revoke what exposes it, give up the passes that write to it."""
        self._require_region(region, "unregister")
        self._exposures.revoke_region(region)
        self._owner.revoked()
        for operation in tuple(self._running):
            if operation.plan.region is region:
                self.cancel(operation)
        for plan in tuple(self._plans):
            if plan.region is region:
                plan.forget()
        self._regions.remove(region)
        region.forget()

    def expose(self, region: Region, generation: int) -> bytes:
        """The handle of a region, as JSON; a generation always names the same region.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region; or nobody can be listened for.
        """
        self._require_region(region, "expose")
        exposure = self._exposures.expose(region, generation)
        return P2pHandle(
            owner=self.name,
            generation=generation,
            secret=exposure.secret.hex(),
            sizes=region.sizes,
            gpu=self._gpu,
            host=this_host(),
            ways=self._owner.ways,
        ).to_bytes()

    def revoke(self, generation: int) -> None:
        """Send nothing more of a generation; one that isn't exposed is left alone."""
        self._require_usable("revoke")
        self._exposures.revoke(generation)
        self._owner.revoked()

    def progress(self) -> None:
        """Take in readers, serve them, and collect notifications, for some milliseconds at most."""
        self._require_usable("progress")
        self._owner.serve()

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket``; the latest few tickets are kept."""
        self._require_usable("readers")
        return self._owner.tickets.readers(ticket)

    @property
    def garbage(self) -> int:
        """How many connections have said what makes no sense, and were closed."""
        return self._owner.garbage

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner, and make what carries its bytes; both sides take part.

        Raises:
            CorruptTransfer, InvalidInfo: The handle is refused; or the sides have different NCCLs.
            WrongOrder: The owner is open.
            Revoked: The owner doesn't expose this generation any more.
            PeerDead: The owner is gone, or is another process than the handle's.
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
        connection = Connection(checked, self._device, self._gpu, self._work, self._turns)
        try:
            connection.open(self.name, deadline)
        except BaseException as error:
            connection.close()
            if isinstance(error, WeightTransferError):
                error.backend = error.backend or BACKEND
            raise
        self._opened[owner] = connection

    def prepare(self, region: Region, copies: Sequence[Copy]) -> Plan:
        """Check a plan, cut it into buckets, and tell its owners of it.

        Raises:
            Revoked: An owner of the plan isn't open.
            OutOfBounds: A copy leaves the memory of one side.
            PeerDead: An owner is gone.
            TransportError: Too many copies, or a region that isn't registered.
        """
        self._require_region(region, "prepare")
        if len(copies) > self.properties.max_descriptors:
            raise _too_much(self.properties.max_descriptors, len(copies))
        of_each: dict[str, list[Copy]] = {}
        for copy in copies:
            of_each.setdefault(copy.owner, []).append(copy)
        owners = {name: self._require_open(name) for name in of_each}
        sources = {name: connection.handle.sizes for name, connection in owners.items()}
        bounds.check_copies(copies, region.sizes, sources, backend=BACKEND)
        buckets = {name: bucketed(its, owners[name].bucket_nbytes) for name, its in of_each.items()}
        if sum(len(bucket.copies) for its in buckets.values() for bucket in its) > MAX_ROWS:
            raise _too_much(MAX_ROWS, "more, once cut into buckets")
        for connection in owners.values():
            connection.step()
            connection.require_up()
        plan = Plan(region, [owners[name].share(its) for name, its in buckets.items()])
        self._plans.add(plan)
        return plan

    def submit(self, plan: Plan) -> Operation:
        """Begin a pass over a plan; ``poll`` moves it.

        Raises:
            TransportError: The memory that it writes to is not registered any more.
            PeerDead: An owner is gone.
            WrongOrder: The plan's last pass is still under way.
        """
        self._require_region(plan.region, "submit")
        if plan.is_busy:
            raise WrongOrder(
                "The plan's last pass is still under way",
                backend=BACKEND,
                where="submit",
                cure="poll it to its end, or cancel it, before the next submit",
            )
        for share in plan.shares:
            share.connection.require_up()
        self._work.behind_caller()
        operation = Operation(plan)
        self._running.append(operation)
        return operation

    def poll(self, operation: Operation) -> Progress:
        """Drive a pass for some milliseconds, and say how far it is.

        Raises:
            PeerDead, Revoked: The pass has failed, and was given up.
        """
        self._require_usable("poll")
        try:
            return operation.advance()
        finally:
            if operation.is_over and operation in self._running:
                self._running.remove(operation)

    def cancel(self, operation: Operation) -> bool:
        """Give a pass up; always True: nothing will write into its targets any more.

        Where NCCL waits for an owner that does not go on, its kernels are ended, and the transport is
        spent.
        """
        if operation in self._running:
            self._running.remove(operation)
        if not operation.is_over:
            operation.give_up()
            if not self._is_closed and not operation.has_drained():
                self.close()
        return True

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``.

        Raises:
            Revoked: The owner isn't open.
            PeerDead: It is gone.
        """
        self._require_usable("notify")
        self._require_open(owner).report(ticket)

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises."""
        self._is_closed = True
        for operation in tuple(self._running):
            with suppress(Exception):
                self.cancel(operation)
        for connection in self._opened.values():
            with suppress(Exception):
                connection.close()
        with suppress(Exception):
            self._owner.close()
        for plan in tuple(self._plans):
            plan.forget()
        self._opened.clear()
        self._regions.clear()

    def _require_usable(self, where: str) -> None:
        if self._is_closed:
            raise TransportError(
                "The transport is closed, or spent by a pass that was given up",
                backend=BACKEND,
                where=where,
                cure="make a new one",
            )

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


def _too_much(most: int, got: object) -> TransportError:
    return TransportError(
        "The plan has too many copies",
        backend=BACKEND,
        where="prepare",
        expected=f"at most {most}",
        got=got,
        cure="send fewer, larger tensors",
    )


def _index(device: torch.device) -> int:
    index: int | None = device.index  # torch declares that there always is one
    return torch.cuda.current_device() if index is None else index


def _identity(device: torch.device) -> str:
    """Of a GPU, as NCCL tells them apart, which takes its variable for the host where that is set."""
    host = os.environ.get("NCCL_HOSTID") or this_host()
    uuid = torch.cuda.get_device_properties(device).uuid
    return hashlib.sha256(f"{host}/{uuid}".encode()).hexdigest()


def _require_nccl() -> None:
    if importlib.util.find_spec("nccl") is None:
        raise BackendUnavailable(
            "NCCL's binding for Python is not installed",
            backend=BACKEND,
            where="import",
            expected="nccl4py",
            cure="pip install nccl4py",
        )
