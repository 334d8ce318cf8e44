"""Any Transport as a full backend: workers pull the trainer's tensors into an arena of their own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.engine import (
    LoadWeights,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WorkerContext,
)
from vllm_wt.errors import CorruptTransfer, ManifestMismatch, WrongOrder
from vllm_wt.exposed import (
    Exposed,
    is_plain,
    require_memory,
    require_one_device,
    same_memory,
    writes_to,
)
from vllm_wt.info import (
    Handle,
    InitInfo,
    Op,
    PullInitInfo,
    PullUpdateInfo,
    UpdateInfo,
    seconds_left,
)
from vllm_wt.loading.plan import GAP, LoadPlan
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Layout, meta_of
from vllm_wt.source import WeightSource
from vllm_wt.transport import Copy, Transport

_POLL_S = 0.0002
"""Seconds between two polls of a transfer; an abort ends the wait at once."""
_SERVE_S = 0.001
"""Seconds between two polls of the owner's endpoint while peers may connect or read."""


class _Connection:
    """A live transport with the arena registered, the owner open and what to read prepared."""

    def __init__(
        self,
        transport: Transport,
        arena: torch.Tensor,
        wanted: _Wanted,
        handle: Handle,
        backend: str,
        deadline: Deadline,
    ) -> None:
        self.transport = transport
        self.owner = handle.owner
        region = transport.register([arena])
        body = handle.unwrap(backend=backend)
        transport.open(handle.owner, handle.generation, body, deadline)
        copies = list(wanted.copies(handle.owner))
        most = transport.properties.max_descriptors
        self.plans = [
            transport.prepare(region, copies[first : first + most])
            for first in range(0, len(copies), most)
        ]


class _Wanted:
    """What to read of the trainer's tensors, and where it goes in the arena.

    Args:
        manifest: The trainer's tensors.
        slices: The parts of them that this rank needs.
    """

    def __init__(self, manifest: Manifest, slices: Slices) -> None:
        self.layout = Layout(slices.plan.manifest)
        self.nbytes = slices.nbytes
        self._slices = slices
        # The trainer exposes what is not empty, in the manifest's order.
        exposed = (tensor.name for tensor in manifest.tensors if tensor.nbytes)
        self._sources = {name: number for number, name in enumerate(exposed)}

    def copies(self, owner: str) -> Iterator[Copy]:
        for slot in self.layout.slots:
            target = slot.offset
            for offset, nbytes in self._slices.runs[slot.tensor.name]:
                yield Copy(owner, self._sources[slot.tensor.name], offset, 0, target, nbytes)
                target += nbytes


class PullEngine(WeightTransferEngine[PullInitInfo, PullUpdateInfo]):
    """Worker side of every Transport.

    The connection is made at init and kept over rounds. Memory that has moved is read through a new
    one, and so is whatever comes after a round that failed: the state of a fabric after an error is
    anybody's guess.

    Args:
        context: Where the worker lives.
        transport_cls: The plugin's Transport.
    """

    init_info_cls = PullInitInfo
    update_info_cls = PullUpdateInfo

    def __init__(self, context: WorkerContext, transport_cls: type[Transport]) -> None:
        super().__init__(context)
        self._transport_cls = transport_cls
        self._slices: Slices | None = None
        self._wanted: _Wanted | None = None
        self._handle: Handle | None = None
        self._arena: torch.Tensor | None = None
        self._connection: _Connection | None = None
        self._quarantine: list[tuple[Transport, Any, torch.Tensor]] = []
        self._receiving: Deadline | None = None
        self._given_up: str | None = None

    def plan_receive(self, plan: LoadPlan) -> LoadPlan:
        properties = self._transport_cls.properties
        self._slices = sliced(
            plan,
            properties.gaps.get(self.context.device.type, GAP),
            properties.alignment,
            properties.max_descriptors,
        )
        return self._slices.plan

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self._drop_connection()
        manifest = init_info.manifest()
        slices, self._slices = self._slices, None
        if slices is None:  # nobody has a plan
            slices = sliced(LoadPlan.of_whole(manifest, "no plan"))
        self._wanted = _Wanted(manifest, slices)
        self._handle = init_info.handle
        if self._arena is None or self._arena.numel() != self._wanted.layout.nbytes:
            self._arena = None  # free the old one before the new one is made
        self._connect(Deadline(init_info.deadline_s))

    def start_weight_update(self) -> None:
        self._given_up = None

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        deadline = self._receiving = Deadline(update_info.deadline_s)
        if self._given_up is not None:  # before this thread got here
            deadline.cancel(self._given_up)
        try:
            if update_info.handle is not None:
                self._drop_connection()
                self._handle = update_info.handle
            if self._connection is None:
                self._connect(deadline)
            self._read(deadline)
            connection, wanted, arena = self._live()
            load_weights(wanted.layout.views(arena))
            connection.transport.notify(connection.owner, update_info.ticket)
        except BaseException:
            self._drop_connection()
            raise

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        if self._receiving is not None:
            self._receiving.cancel(reason)

    def shutdown(self) -> None:
        self._drop_connection()
        self._arena = self._wanted = self._handle = None

    def _live(self) -> tuple[_Connection, _Wanted, torch.Tensor]:
        if self._connection is None or self._wanted is None or self._arena is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        return self._connection, self._wanted, self._arena

    def _connect(self, deadline: Deadline) -> None:
        if self._wanted is None or self._handle is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        self._release_quarantine()
        if self._arena is None:
            self._arena = torch.zeros(
                self._wanted.layout.nbytes, dtype=torch.uint8, device=self.context.device
            )
            if self._arena.is_cuda:  # a fabric writes without regard to our streams
                torch.cuda.current_stream(self._arena.device).synchronize()
        name = f"worker{self.context.rank}-{uuid.uuid4().hex[:12]}"
        transport = self._transport_cls(name, self.context.device)
        try:
            self._connection = _Connection(
                transport, self._arena, self._wanted, self._handle, self.context.backend, deadline
            )
        except BaseException:
            transport.close()
            raise

    def _read(self, deadline: Deadline) -> None:
        connection, wanted, arena = self._live()
        done = 0
        for plan in connection.plans:
            operation = connection.transport.submit(plan)
            try:
                while not (progress := connection.transport.poll(operation)).done:
                    deadline.check(
                        "The trainer's memory was not read in time",
                        where="receive_weights",
                        got=f"{done + progress.nbytes} of {wanted.nbytes} bytes",
                    )
                    deadline.wait(_POLL_S)
            except BaseException:
                if not connection.transport.cancel(operation):
                    # Something may still write into the arena: it is kept, unused, until that is over.
                    self._quarantine.append((connection.transport, operation, arena))
                    self._connection = self._arena = None
                raise
            done += progress.nbytes
        if done != wanted.nbytes:
            raise CorruptTransfer(
                "The fabric has read less than it was asked to, and calls it done",
                where="receive_weights",
                expected=f"{wanted.nbytes} bytes",
                got=f"{done} bytes",
                cure="push again; if it stays, report it to the authors of the backend",
            )

    def _release_quarantine(self) -> None:
        held, self._quarantine = self._quarantine, []
        for transport, operation, arena in held:
            if transport.cancel(operation):
                transport.close()
            else:
                self._quarantine.append((transport, operation, arena))

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.transport.close()
            self._connection = None


class PullTrainer(TrainerWeightTransferEngine):
    """Trainer side of every Transport.

    Contiguous tensors are exposed where they are, nothing is copied; any other tensor has one
    contiguous copy that is refreshed at each publish. Memory that moved between rounds is noticed
    and exposed anew.

    Args:
        source: The weights.
        backend: Name of the backend.
        transport_cls: The plugin's Transport.
        options: Options of the backend; none are known to core.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        backend: str,
        transport_cls: type[Transport],
        **options: Any,
    ) -> None:
        super().__init__(source, backend=backend, **options)
        self._transport_cls = transport_cls
        self._session = uuid.uuid4().hex
        self._manifest = source.manifest()
        self._transport: Transport | None = None
        self._lock = threading.Lock()  # the serving thread and the caller share the transport
        self._region: Any = None
        self._exposed: list[Exposed] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._generation = 0
        self._ticket = 0
        self._version = 0

    @property
    def generation(self) -> int:
        return self._generation

    def describe(self, deadline: Deadline) -> InitInfo:
        self._expose()
        return PullInitInfo(
            session=self._session,
            tensors=InitInfo.tensors_of(self._manifest),
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
            handle=self._handle(),
        )

    def publish(self, version: int, deadline: Deadline) -> None:
        self._expose()
        self._version = version
        self._ticket += 1

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        if op in {"seal", "all"}:
            self._require_in_place()
        return PullUpdateInfo(
            op=op,
            session=self._session,
            version=self._version,
            ticket=self._ticket,
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
            handle=self._handle() if op in {"open", "all"} and known != self._generation else None,
        )

    def serve(self, stop: threading.Event) -> None:
        while not stop.wait(_SERVE_S):
            with self._lock:
                if self._transport is not None:
                    self._transport.progress()

    def delivered(self) -> int:
        with self._lock:
            return len(self._transport.readers(self._ticket)) if self._transport else 0

    def shutdown(self) -> None:
        with self._lock:
            if self._transport is not None:
                self._transport.close()
            self._transport = self._region = None
            self._exposed = []
            self._copies = {}

    def _buffers(self) -> tuple[Manifest, list[torch.Tensor]]:
        """The non-empty tensors as they are to be read, contiguous, with this pass's values."""
        metas, buffers = [], []
        made = self.source.made
        settled: set[torch.device] = set()
        for name, tensor in self.source:
            metas.append(meta_of(name, tensor))
            if tensor.numel():
                require_memory(name, tensor)
                if tensor.is_cuda and tensor.device not in settled:
                    # What other streams still write must be in what is copied here, too.
                    torch.cuda.synchronize(tensor.device)
                    settled.add(tensor.device)
                in_place = name not in made and is_plain(tensor)
                buffers.append(tensor if in_place else self._copy(name, tensor))
        return Manifest(tuple(metas)), buffers

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._copies.get(name)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (
            tensor.shape,
            tensor.dtype,
            tensor.device,
        ):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._copies[name] = kept
        return kept.copy_(tensor)

    def _expose(self) -> None:
        """Make the source's current values readable; a new generation when memory has moved."""
        manifest, buffers = self._buffers()
        self._manifest.require_same(manifest.tensors, where="publish")
        require_one_device(buffers)
        if buffers and buffers[0].is_cuda:
            torch.cuda.synchronize(buffers[0].device)  # readers see memory, not our streams
        with self._lock:
            former, self._exposed = self._exposed, [Exposed.of(buffer) for buffer in buffers]
            if self._region is not None and same_memory(former, self._exposed):
                return
            if self._transport is None:
                device = buffers[0].device if buffers else torch.device("cpu")
                self._transport = self._transport_cls(f"trainer-{self._session[:12]}", device)
            elif self._region is not None:
                region, self._region = self._region, None  # gone, whatever fails from here on
                self._transport.revoke(self._generation)
                self._transport.unregister(region)
            self._region = self._transport.register([exposed.memory for exposed in self._exposed])
            self._generation += 1  # first: one that was revoked must not be told again

    def _require_in_place(self) -> None:
        """What the workers have read was in the memory that was exposed, all the time."""
        for exposed in self._exposed:
            if not exposed.in_place:
                raise ManifestMismatch(
                    "A tensor was freed or resized while the workers were reading it",
                    where=exposed.title,
                    expected="memory that stays until push returns",
                    got="other memory, or none",
                    cure="let push return before memory is freed or resized; nothing was committed",
                )
        for exposed in self._exposed:
            if writes_to(exposed.buffer) != exposed.writes:
                raise ManifestMismatch(
                    "A tensor was written to while the workers were reading it",
                    where=exposed.title,
                    expected="values that stay until push returns",
                    got="a change in place",
                    cure="let push return before the next training step; nothing was committed",
                )

    def _handle(self) -> Handle:
        with self._lock:
            if self._transport is None:
                raise WrongOrder("The trainer's memory is not exposed", cure="connect again")
            body = self._transport.expose(self._region, self._generation)
        return Handle.wrap(f"trainer-{self._session[:12]}", self._generation, body)
