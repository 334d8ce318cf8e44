"""The Transport over NIXL."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import get_args

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Revoked, TransportError, WrongOrder
from vllm_wt.options import require_one_of
from vllm_wt.transport import Copy, Progress, TransportProperties
from vllm_wt_rdma import devices as net
from vllm_wt_rdma import nixl
from vllm_wt_rdma.batching import batch, check_copies
from vllm_wt_rdma.emulation import Trials
from vllm_wt_rdma.endpoint import Endpoint
from vllm_wt_rdma.exposures import Exposures
from vllm_wt_rdma.info import Emulation, NixlHandle, decode
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.operation import (
    Beacon,
    Operation,
    Plan,
    Prepared,
    Read,
    check_beacon,
    release_beacon,
)
from vllm_wt_rdma.region import KINDS, Region, deregister, register
from vllm_wt_rdma.tickets import Tickets, message
from vllm_wt_rdma.words import WORD, Words

_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_OPEN_POLL_S = 0.0005


class NixlTransport:
    """One-sided reads by NIXL's UCX backend.

    **Spent after a failure.** When ``open`` fails on the fabric (not for its handle), and when
    ``cancel`` has to stop reads that don't complete within moments or have failed, the NIXL agent
    is destroyed, since nothing less stops a read. From then on every call but ``close`` and
    ``cancel`` fails: make a new transport, with a new name. A cancelled pass that could complete
    what it had posted spends nothing; its plan can be submitted again.

    **Revoking** can't stop a reader that reads on: NIXL has no such means. The reader notices,
    before it starts and again when it has everything, and raises ``Revoked``.

    Args:
        name: Name of this endpoint: ASCII letters, digits and ``_.:-``, at most 128.
        device: Where its buffers will live.
        devices: Network devices that UCX may use, ``"mlx5_0:1"`` or ``"eth0"``: a name, several with
            commas between them, or a sequence of names. None: those that UCX takes by itself, of all or
            of ``UCX_NET_DEVICES``; for a GPU's memory the nearest.
        emulation: What a reader on the same host does when it finds that GPU memory which it reads into
            a GPU's goes by UCX's emulation: ``"error"`` or ``"warning"``; see `emulation`.

    Raises:
        BackendUnavailable: NIXL doesn't work here.
        InvalidInfo: An option has a wrong value.
        TransportError: The name can't be used.
    """

    properties = TransportProperties(
        memory=frozenset(KINDS),
        alignment=1,
        owner_must_poll=True,
        thread_safe=False,
        can_cancel=True,
    )

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        devices: str | Sequence[str] | None = None,
        emulation: Emulation = "error",
    ) -> None:
        require_one_of("emulation", emulation, get_args(Emulation))
        limits = net.parsed(devices)
        if not _NAME.fullmatch(name):
            raise TransportError(
                "The endpoint's name can't be used",
                backend=BACKEND,
                expected=_NAME.pattern,
                got=repr(name),
                cure="use letters, digits and the characters of the pattern",
            )
        self.name = name
        self._device = device
        self._threads = threading.local()
        self._use_device()
        with net.limited_to(limits), nixl.made_for(device):
            self._endpoint = Endpoint(name)
        self._words = Words(self._endpoint)
        self._exposures = Exposures(name, self._endpoint, self._words, emulation)
        self._trials = Trials()
        self._tickets = Tickets()
        self._regions: set[Region] = set()
        self._opened: dict[str, NixlHandle] = {}
        # What core's dropped plans held is given back by the thread that next calls `prepare` or
        # `open`, not by whichever thread collects garbage: NIXL isn't thread-safe here.
        self._plans: list[tuple[weakref.ref[Plan], Prepared]] = []

    def register(self, buffers: Sequence[torch.Tensor]) -> Region:
        """Make contiguous, non-empty buffers known to NIXL, in one call a kind of memory.

        Raises:
            TransportError: A buffer is empty, not contiguous, or on an unsupported device.
        """
        self._use_device()
        region = register(self._endpoint, buffers)
        self._regions.add(region)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region, revoke what exposes it and give back the plans that write to it."""
        self._use_device()
        self._require_region(region, "unregister")
        self._exposures.revoke_region(region)
        self._release_plans(lambda prepared: prepared.region is region)
        self._regions.remove(region)
        deregister(self._endpoint, region)

    def expose(self, region: Region, generation: int) -> bytes:
        """The handle of a region, as JSON; a generation always names the same region.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region.
        """
        self._require_region(region, "expose")
        return self._exposures.handle(region, generation)

    def revoke(self, generation: int) -> None:
        """Let readers know; a generation that isn't exposed is left alone."""
        self._exposures.revoke(generation)

    def progress(self) -> None:
        """Drive the fabric once: connects peers, serves reads, collects notifications."""
        self._use_device()
        self._tickets.add(self._endpoint.receive())

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket``; the latest few tickets are kept."""
        return self._tickets.readers(ticket)

    @property
    def garbage(self) -> int:
        """How many notifications were none of ours, and ignored."""
        return self._tickets.garbage

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner and see that its memory can be read.

        An owner is opened once: UCX keeps the socket, at both ends, of a peer that is removed and
        added again.

        Raises:
            CorruptTransfer, InvalidInfo: The handle is refused; NIXL has not seen it.
            WrongOrder: The owner is open.
            Revoked: The owner doesn't expose this generation any more.
            PeerDead: The owner is gone; the transport is spent.
            Timeout: The owner doesn't poll or can't be reached; the transport is spent.
        """
        self._use_device()
        info = decode(handle, owner=owner, generation=generation)
        if owner in self._opened:
            raise WrongOrder(
                f"Owner {owner!r} is open",
                backend=BACKEND,
                where="open",
                cure="read its new generation through a new transport",
            )
        try:
            self._endpoint.add_peer(owner, info.agent_metadata, info.nixl)
            beacon = self._make_beacon(info)
            self._await_connection(beacon, deadline)
        except BaseException:
            self._endpoint.destroy()
            raise
        try:
            check_beacon(self._words, beacon)
        finally:
            release_beacon(beacon, self._endpoint, self._words)
        self._opened[owner] = info

    def prepare(self, region: Region, copies: Sequence[Copy]) -> Plan:
        """Check a plan and make its reads; a round makes nothing new.

        Raises:
            Revoked: An owner of the plan isn't open.
            OutOfBounds: A copy leaves the memory of one side.
            TransportError: Too many copies, or a region that isn't registered.
        """
        self._use_device()
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
        sources = {name: info.buffers for name, info in owners.items()}
        check_copies(copies, region.buffers, sources)
        self._release_plans(lambda prepared: False)
        prepared = Prepared(region)
        try:
            for info in owners.values():
                prepared.beacons.append(self._make_beacon(info))
            for rows in batch(copies, region.buffers, sources):
                number = self._endpoint.make_read(
                    rows.owner, (rows.local_kind, rows.local), (rows.remote_kind, rows.remote)
                )
                prepared.data.append(Read(number, rows.nbytes))
                if sample := self._trials.sample(rows, number, owners[rows.owner]):
                    prepared.samples.append(sample)
        except BaseException:
            prepared.release(self._endpoint, self._words)
            raise
        plan = Plan(prepared)
        self._plans.append((weakref.ref(plan), prepared))
        return plan

    def submit(self, plan: Plan) -> Operation:
        """Begin a pass over a plan. Nothing is posted before the first ``poll``, which core calls at
        once: so whatever fails on the fabric fails with an operation that can be cancelled.

        Raises:
            Revoked: The memory of one side, or an owner's connection, has been replaced since.
            WrongOrder: The plan's last pass is still under way.
        """
        self._use_device()
        if plan.prepared.revoked or self._endpoint.destroyed:
            raise Revoked(
                "The plan's memory or its connection is gone",
                backend=BACKEND,
                where="submit",
                cure="open the owner and prepare the plan again; after an error, on a new transport",
            )
        if plan.prepared.busy:
            raise WrongOrder(
                "The plan's last pass is still under way",
                backend=BACKEND,
                where="submit",
                cure="poll it to its end, or cancel it, before the next submit",
            )
        trials = self._trials.of(plan.prepared.samples)
        return Operation(self._endpoint, self._words, plan, trials)

    def poll(self, operation: Operation) -> Progress:
        """Drive a pass and say how far it is; within a host about one chunk is copied here.

        Raises:
            PeerDead, Revoked: The pass has failed; cancel it.
            TransportError: So it has, or what it reads of a GPU on this host is emulated.
        """
        self._use_device()
        return operation.advance()

    def cancel(self, operation: Operation) -> bool:
        """Give a pass up. True when nothing will write into its targets any more.

        What was posted gets a moment to complete. If it doesn't, or has failed, the NIXL agent is
        destroyed and the transport is spent.
        """
        with suppress(Exception):
            self._use_device()
            if not self._endpoint.destroyed and operation.give_up():
                return True
        if not self._endpoint.destroy():
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies that UCX has queued on the device
        return True

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``.

        Raises:
            Revoked: The owner isn't open.
            PeerDead: It is gone.
        """
        self._use_device()
        self._require_open(owner)
        self._endpoint.send(owner, message(self.name, ticket))
        self._tickets.add(self._endpoint.receive())  # drives UCX, so that it leaves now

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises."""
        with suppress(Exception):
            self._exposures.revoke_all()  # this process's memory may outlive its endpoint
        self._endpoint.destroy()
        self._regions.clear()
        self._opened.clear()
        self._plans.clear()

    def _use_device(self) -> None:
        """Make the device's CUDA context exist, and current on this thread; see `nixl.use_cuda`."""
        if self._device.type == "cuda" and not hasattr(self._threads, "ready"):
            if self._device.index is None:
                self._device = torch.device("cuda", torch.cuda.current_device())
            nixl.use_cuda(self._device)
            self._threads.ready = True

    def _make_beacon(self, info: NixlHandle) -> Beacon:
        slot = self._words.take()
        try:
            number = self._endpoint.make_read(
                info.agent,
                ("DRAM", [self._words.row(slot)]),
                ("DRAM", [(info.beacon, WORD, 0)]),
            )
        except BaseException:
            self._words.give_back(slot)
            raise
        return Beacon(info.agent, info.generation, info.nonce, slot, Read(number, 0))

    def _await_connection(self, beacon: Beacon, deadline: Deadline) -> None:
        """Read the owner's beacon: only a read that completes shows that the connection is up."""
        done = self._endpoint.post(beacon.read.number)
        while not done:
            deadline.check(
                f"Owner {beacon.owner!r} has not answered",
                where="open",
                got="no answer: it is stopped, doesn't poll, or is out of reach",
            )
            deadline.wait(_OPEN_POLL_S)
            done = self._endpoint.check(beacon.read.number)

    def _release_plans(self, stale: Callable[[Prepared], bool]) -> None:
        """Give back plans that core has dropped, and those that ``stale`` picks.

        Raises:
            WrongOrder: One of them has a pass under way; the transport is spent.
        """
        kept = []
        for reference, prepared in self._plans:
            if reference() is not None and not stale(prepared):
                kept.append((reference, prepared))
            elif not prepared.busy:
                prepared.release(self._endpoint, self._words)
            else:
                self._endpoint.destroy()  # its reads would write on into memory that is used anew
                raise WrongOrder(
                    "A pass is still under way over a plan that ends here",
                    backend=BACKEND,
                    cure="poll a pass to its end or cancel it; make a new transport",
                )
        self._plans = kept

    def _require_region(self, region: Region, where: str) -> None:
        if region not in self._regions:
            raise TransportError(
                "The region is not registered with this transport",
                backend=BACKEND,
                where=where,
                cure="register it with this transport first",
            )

    def _require_open(self, owner: str) -> NixlHandle:
        info = self._opened.get(owner)
        if info is None:
            raise Revoked(
                f"Owner {owner!r} is not open",
                backend=BACKEND,
                expected=f"one of {', '.join(self._opened) or 'none'}",
                cure="open the owner's handle",
            )
        return info
