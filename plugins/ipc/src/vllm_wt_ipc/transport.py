"""The Transport within a host: readers map the owner's memory and copy from there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from vllm_wt.bounds import check_copies
from vllm_wt.deadline import Deadline
from vllm_wt.errors import TransportError, WeightTransferError, WrongOrder
from vllm_wt.transport import Copy, Progress, TransportProperties
from vllm_wt_ipc import BACKEND, cuda, devices, host, memory
from vllm_wt_ipc.batching import runs_of
from vllm_wt_ipc.connection import Connection
from vllm_wt_ipc.device_mover import DeviceMover
from vllm_wt_ipc.exposures import Exposures
from vllm_wt_ipc.info import IpcHandle, decode, parse
from vllm_wt_ipc.messages import NAME
from vllm_wt_ipc.operation import HostMover, Mover, Operation, Plan
from vllm_wt_ipc.region import KINDS, Region, as_bytes, register
from vllm_wt_ipc.serving import Server
from vllm_wt_ipc.tickets import Tickets


class IpcTransport:
    """One-sided reads of memory that is mapped: memfd on a host, CUDA IPC on a GPU.

    The owner's CPU is needed to connect and for reports; a pass goes on while the owner is stopped.
    **Revoking** can't take a map away from a reader: it notices, before it reads and after.

    Args:
        name: Name of this endpoint: ASCII letters, digits and ``_.:-``, at most 128.
        device: Where its buffers will live.

    Raises:
        TransportError: The name can't be used.
        BackendUnavailable: For CUDA: cuda-bindings can't be imported.
    """

    properties = TransportProperties(
        memory=frozenset(KINDS),
        alignment=1,
        owner_must_poll=True,
        thread_safe=False,
        can_cancel=True,
        gaps={"cpu": 1 << 10, "cuda": 1 << 12},
        maps=True,
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
        self._device = cuda.indexed(device) if device.type == "cuda" else device
        self._stream: torch.cuda.Stream | None = None
        self._imports: cuda.Imports | None = None
        if device.type == "cuda":
            cuda.driver()
            self._imports = cuda.Imports(self._device)
        self._closed = False
        self._pid = os.getpid()
        self._regions: set[Region] = set()
        self._tickets = Tickets()
        self._exposures = Exposures(name)
        self._server = Server(self._exposures, self._tickets)
        self._opened: dict[str, Connection] = {}

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory that can be exposed: zeros, uint8, shape ``(nbytes,)``; it goes with the tensor.

        Raises:
            TransportError: There is not so much shared memory.
        """
        if device.type == "cpu":
            return memory.make(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        """Whether readers can map a tensor where it is.

        Raises:
            TransportError: It is GPU memory that CUDA IPC doesn't take.
        """
        if tensor.is_cuda:
            cuda.require_exportable(tensor)
            return True
        return tensor.device.type == "cpu" and memory.descriptor_of(tensor) is not None

    def register(self, buffers: Sequence[torch.Tensor]) -> Region:
        """Hold contiguous, non-empty buffers; a reader's may be of any memory.

        Raises:
            TransportError: A buffer is empty, not contiguous, or on an unsupported device.
        """
        self._require_usable("register")
        region = register(buffers)
        self._regions.add(region)
        return region

    def unregister(self, region: Region) -> None:
        """Forget a region, revoke what exposes it and end the passes that write to it."""
        self._require_region(region, "unregister")
        self._exposures.revoke_region(region)
        if self._stream is not None:
            self._stream.synchronize()
        self._regions.remove(region)
        region.release()

    def expose(self, region: Region, generation: int) -> bytes:
        """The handle of a region, as JSON; a generation always names the same region.

        Raises:
            Revoked: The generation was revoked.
            TransportError: It names another region, or memory that can't be shared.
        """
        self._require_region(region, "expose")
        handle = self._exposures.expose(region, generation)
        self._server.start()
        return handle

    def revoke(self, generation: int) -> None:
        """Let readers know; a generation that isn't exposed is left alone."""
        self._require_usable("revoke")
        self._exposures.revoke(generation)

    def progress(self) -> None:
        """Let readers in and take in their reports."""
        self._require_usable("progress")
        self._server.progress()

    def listen(self, seconds: float) -> None:
        """Wait until somebody comes or says something, for so long at most."""
        self._require_usable("listen")
        self._server.listen(seconds)

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket``; the latest few tickets are kept."""
        self._require_usable("readers")
        return self._tickets.readers(ticket)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner and map its memory.

        Raises:
            CorruptTransfer, InvalidInfo: The handle is refused.
            WrongOrder: The owner is open.
            TransportError: It is on another host, in another container or on another GPU.
            Revoked: It doesn't expose this generation any more.
            PeerDead: It is gone.
            Timeout: It is stopped, or doesn't poll.
        """
        self._require_usable("open")
        info = decode(handle, owner=owner, generation=generation)
        if owner in self._opened:
            raise WrongOrder(
                f"Owner {owner!r} is open",
                backend=BACKEND,
                where="open",
                cure="read its new generation through a new transport",
            )
        host.require_here(owner, host.Host(info.boot, info.network))
        self._require_kind(info)
        connection = Connection(info, self.name, deadline)
        try:
            connection.buffers = self._map(info, connection)
            connection.look()
        except BaseException:
            connection.close()
            raise
        self._opened[owner] = connection

    @staticmethod
    def is_near(handle: bytes, device: torch.device) -> bool:
        """Whether a handle is of memory that a reader on this device can map.

        Raises:
            CorruptTransfer, InvalidInfo: It is no handle.
        """
        info = parse(handle)
        if device.type == "cuda":
            return info.gpu == cuda.gpu_of(cuda.indexed(device))
        return not info.gpu and host.Host(info.boot, info.network) == host.here()

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        """The owner's buffers: uint8, of its own memory, to be read only; until `close`.

        Raises:
            WrongOrder: The owner isn't open.
        """
        return self._require_open(owner, "map").buffers

    def check(self, owner: str) -> None:
        """See that the owner lives and still exposes what was mapped; microseconds.

        Raises:
            PeerDead, Revoked: What is mapped must not be read any more.
        """
        self._require_open(owner, "check").look()

    def prepare(self, region: Region, copies: Sequence[Copy]) -> Plan:
        """Check a plan and make its copies; a round makes nothing new.

        Raises:
            WrongOrder: An owner of the plan isn't open.
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
        names = dict.fromkeys(copy.owner for copy in copies)
        owners = {name: self._require_open(name, "prepare") for name in names}
        sources = {name: owner.buffers for name, owner in owners.items()}
        sizes = {name: [each.numel() for each in own] for name, own in sources.items()}
        check_copies(copies, region.sizes, sizes, backend=BACKEND)
        nbytes = sum(copy.nbytes for copy in copies)
        mover = self._mover(region, copies, sources, nbytes)
        return Plan(region, tuple(owners.values()), mover, nbytes)

    def submit(self, plan: Plan) -> Operation:
        """Begin a pass over a plan.

        Raises:
            PeerDead, Revoked: An owner's memory must not be read any more; nothing was begun.
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
        return Operation(plan)

    def poll(self, operation: Operation) -> Progress:
        """Drive a pass and say how far it is; on a CPU some tens of MiB are copied here.

        Raises:
            PeerDead, Revoked: The pass has failed; cancel it.
        """
        self._require_region(operation.plan.region, "poll")
        return operation.advance()

    def cancel(self, operation: Operation) -> bool:
        """Give a pass up: what was started on a GPU is waited for, and no more is copied."""
        try:
            operation.give_up()
        except WeightTransferError:  # CUDA can't say whether it writes
            return False
        return True

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``.

        Raises:
            WrongOrder: The owner isn't open.
            PeerDead: It is gone.
        """
        self._require_open(owner, "notify").report(ticket)

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:  # what a fork would take back is its parent's
            return
        with suppress(Exception):
            self._exposures.close()
        self._server.close()
        if self._stream is not None:
            with suppress(Exception):
                self._stream.synchronize()
        for connection in self._opened.values():
            connection.close()
        if self._imports is not None:
            self._imports.close()
        for region in self._regions:
            region.release()
        self._regions.clear()
        self._opened.clear()

    def _require_kind(self, info: IpcHandle) -> None:
        """Refuse memory of a GPU that isn't this side's."""
        if info.gpu and self._imports is None:
            raise _other_kind(info.owner, "open", "host memory", "memory of a GPU")
        if info.gpu:
            devices.require_same_gpu(info.owner, info.gpu, self._device.index, cuda.visible())

    def _map(self, info: IpcHandle, connection: Connection) -> tuple[torch.Tensor, ...]:
        places = {"host": connection.segments, "cuda": self._import(info, connection)}
        return tuple(
            places[each.kind][each.memory][each.offset : each.offset + each.nbytes]
            for each in info.buffers
        )

    def _import(self, info: IpcHandle, connection: Connection) -> list[torch.Tensor]:
        if self._imports is None:
            return []
        try:
            return [self._imports.open(each.raw, each.nbytes) for each in info.allocations]
        except TransportError:
            connection.look()  # the reason may be that the owner has gone, or has freed it
            raise

    def _mover(
        self,
        region: Region,
        copies: Sequence[Copy],
        sources: Mapping[str, Sequence[torch.Tensor]],
        nbytes: int,
    ) -> Mover:
        """The copies of a checked plan, as what makes them."""
        self._require_targets(region, copies)
        targets = region.tensors
        to_gpu = [copy for copy in copies if targets[copy.target].is_cuda]
        to_host = [copy for copy in copies if not targets[copy.target].is_cuda]
        mapped = {name: [each.data_ptr() for each in own] for name, own in sources.items()}
        from_host = [c for c in to_gpu if not sources[c.owner][c.source].is_cuda]
        if from_host:
            raise _other_kind(from_host[0].owner, "prepare", "memory of the GPU", "host memory")
        if self._imports is None:
            return HostMover(runs_of(to_host, [each.data_ptr() for each in targets], mapped))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return DeviceMover(
            runs_of(to_gpu, [each.data_ptr() for each in targets], mapped),
            [
                (
                    _part(as_bytes(targets[copy.target]), copy.target_offset, copy.nbytes),
                    _part(sources[copy.owner][copy.source], copy.source_offset, copy.nbytes),
                )
                for copy in to_host
            ],
            nbytes,
            self._stream,
        )

    def _require_targets(self, region: Region, copies: Sequence[Copy]) -> None:
        """Refuse to write to a GPU that is not the transport's."""
        for index in {copy.target for copy in copies}:
            target = region.tensors[index]
            if target.is_cuda and target.device != self._device:
                raise TransportError(
                    f"Target buffer {index} is on another device than the transport",
                    backend=BACKEND,
                    where="prepare",
                    expected=f"{self._device}, or host memory",
                    got=target.device,
                    cure="make the transport for the device of the buffers",
                )

    def _require_usable(self, where: str) -> None:
        if self._closed:
            raise TransportError(
                "This transport was closed",
                backend=BACKEND,
                where=where,
                cure="make a new transport",
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

    def _require_open(self, owner: str, where: str) -> Connection:
        self._require_usable(where)
        connection = self._opened.get(owner)
        if connection is None:
            raise WrongOrder(
                f"Owner {owner!r} is not open",
                backend=BACKEND,
                where=where,
                expected=f"one of {', '.join(self._opened) or 'none'}",
                cure="open the owner's handle",
            )
        return connection


def _other_kind(owner: str, where: str, expected: str, got: str) -> TransportError:
    return TransportError(
        f"Owner {owner!r} has memory of another kind than this side",
        backend=BACKEND,
        where=where,
        expected=expected,
        got=got,
        cure="keep the trainer's weights on the worker's GPU, or use the rdma backend",
    )


def _part(buffer: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    return buffer[offset : offset + nbytes]
