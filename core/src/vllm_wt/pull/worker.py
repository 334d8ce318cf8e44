"""The worker's side of every Transport: pulls what its plan needs into an arena of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import LoadWeights, WeightTransferEngine, WorkerContext
from vllm_wt.errors import Aborted, TransportError, WrongOrder
from vllm_wt.info import Handle, PullInitInfo, PullUpdateInfo
from vllm_wt.loading.arena import Arena, Choice
from vllm_wt.loading.plan import GAP, LoadPlan
from vllm_wt.loading.reception import Reception
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.loading.staging import Intake
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.itinerary import Itinerary
from vllm_wt.pull.mapped import Mapped
from vllm_wt.pull.names import reader_name
from vllm_wt.pull.reading import Reading
from vllm_wt.transport import Transport

logger = logging.getLogger(__name__)

_DEATH_S = 0.5
"""Seconds between two looks at whether a trainer lives whose memory is mapped."""
_CHUNK_NBYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Bytes of a pass. On a CPU a part is verified while the next one is read."""


class PullEngine(WeightTransferEngine[PullInitInfo, PullUpdateInfo]):
    """Worker side of every Transport.

    The connection is made at init and kept over rounds. Memory that has moved is read through a new
    one, and so is whatever comes after a round that failed: the state of a fabric after an error is
    anybody's guess.

    Args:
        context: Where the worker lives.
        transport_cls: The plugin's Transport.
        choose: Gives the one that a trainer names, where there are several.

    Raises:
        InvalidInfo, LoadError: The arena that the environment asks for cannot be had.
    """

    init_info_cls = PullInitInfo
    update_info_cls = PullUpdateInfo

    def __init__(
        self,
        context: WorkerContext,
        transport_cls: type[Transport],
        *,
        choose: Callable[[str], type[Transport]] | None = None,
    ) -> None:
        super().__init__(context)
        self._transport_cls = transport_cls
        self._choose = choose
        self._chosen = transport_cls
        """The one that the trainer has named."""
        self._arena = Arena(context.device)
        self._planned: Reception | None = None
        self._slices: Slices | None = None
        self._itinerary: Itinerary | None = None
        """What to read, unless it is mapped."""
        self._exposure: Exposure | None = None
        self._choice = Choice("device", "nothing is received yet")
        self._handle: Handle | None = None
        self._engine = ""
        """What the trainer calls this worker's engine."""
        self._counted = True
        self._reading: Reading | Mapped | None = None
        self._watch = threading.Event()
        """Set once the mapped memory of a trainer needs no watching any more."""
        self._quarantine: list[Reading | Mapped] = []
        self._in_use = threading.RLock()
        """Held while the connection is used, made or dropped."""
        self._is_ahead = False
        """Whether the trainer has asked for what was received last before it was there, and listens."""
        self._receiving: Deadline | None = None
        self._given_up: str | None = None

    @property
    def staging(self) -> Choice:
        """Where it receives, and why."""
        return self._choice

    @property
    def arena_nbytes(self) -> int:
        """Memory that is held for receiving: the most that a round has needed."""
        return self._arena.nbytes

    def plan_receive(self, plan: LoadPlan, init_info: PullInitInfo) -> Intake:
        properties = self._named(init_info.transport).properties
        exposure = Exposure.of(init_info, plan.manifest)
        alignment = properties.alignment
        slices = sliced(
            plan,
            properties.gaps.get(self.context.device.type, GAP),
            max(BLOCK, alignment) if exposure.digested else alignment,
            properties.max_descriptors,
        )
        if init_info.mapped and properties.maps:
            streams = init_info.staging == "none"
            why = "the trainer's memory is mapped, and is loaded from where it is"
            every = tuple(tensor.name for tensor in plan.manifest.tensors)
            intake = Intake(plan, (every,) if streams else None, at_hand=True)
            choice = Choice("none" if streams else "mapped", why)
            self._planned = Reception(slices, choice, (), intake)
        else:
            self._planned = Reception.planned(
                plan, slices, self._arena, init_info.staging, host="cpu" in properties.memory
            )
        return self._planned.intake

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self._drop_connection()
        manifest = init_info.manifest()
        planned, self._planned = self._planned, None
        if planned is None:  # nobody has a plan
            self.plan_receive(LoadPlan.of_whole(manifest, "no plan"), init_info)
            planned, self._planned = self._planned, None
            assert planned is not None
        self._slices, self._choice = planned.slices, planned.choice
        self._chosen = self._named(init_info.transport)
        properties = self._chosen.properties
        self._handle = self._nearest((init_info.handle, *init_info.others))
        self._engine = init_info.engine
        self._counted = init_info.verify != "off"
        self._exposure = Exposure.of(init_info, manifest)
        self._itinerary = None
        if planned.parts:
            self._itinerary = Itinerary(
                self._exposure,
                self._slices,
                planned.parts,
                owner=self._handle.owner,
                chunk_nbytes=_CHUNK_NBYTES[self._device.type],
                most=properties.max_descriptors,
                alignment=properties.alignment,
            )
        self._connect(Deadline(init_info.deadline_s))
        logger.info(
            "vllm-wt: staging %s (%s), %d bytes", *vars(self._choice).values(), self._arena.nbytes
        )

    def start_weight_update(self) -> None:
        self._given_up = None

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        deadline = self._receiving = Deadline(update_info.deadline_s)
        if self._given_up is not None:  # before this thread got here
            deadline.cancel(self._given_up)
        with self._in_use:
            try:
                if update_info.handle is not None:
                    handle = self._nearest((update_info.handle, *update_info.others))
                    if handle != self._handle or not update_info.others:
                        self._drop_connection()
                        self._handle = handle
                if self._reading is None:
                    self._connect(deadline)
                assert self._reading is not None
                self._is_ahead = update_info.ahead
                if self._is_ahead:
                    self._mapped().await_published(update_info.ticket, deadline)
                self._reading.run(update_info.ticket, load_weights, deadline)
            except BaseException:
                self._drop_connection()
                raise

    def require_kept(self) -> None:
        if self._itinerary is None:  # else what was received is in memory of our own
            with self._in_use:
                self._mapped().require_kept()

    @contextmanager
    def kept(self) -> Iterator[None]:
        if self._itinerary is not None:
            yield
            return
        with self._in_use:
            mapped = self._mapped()
            yield
            mapped.require_kept()

    def finish_weight_update(self) -> None:
        if self._is_ahead:
            with self._in_use:
                self._mapped().tell_committed()

    def _mapped(self) -> Mapped:
        if isinstance(self._reading, Mapped):
            return self._reading
        raise Aborted(
            "The trainer has ended, and its memory was given back",
            where="mapped memory",
            expected="a trainer that lives until the engine has committed",
            got="one that is gone",
            cure="connect again, and push",
        )

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        if self._receiving is not None:
            self._receiving.cancel(reason)

    def report(self) -> dict[str, Any]:
        """Whom it reads, where it receives and why, the memory held for that, and what an update needs.

        What is held is the peak, too: it grows before a round, and is kept. Only the memory of a
        round that failed, while a fabric may still write to it, comes on top.
        """
        needed = 0 if self._itinerary is None else self._itinerary.arena_nbytes
        return {
            "owner": "" if self._handle is None else self._handle.owner,
            "staging": self._choice.staging,
            "why": self._choice.why,
            "arena_nbytes": self._arena.nbytes,
            "needed_nbytes": needed,
        }

    def shutdown(self) -> None:
        self._drop_connection()
        self._release_quarantine()
        self._itinerary = self._exposure = self._slices = self._handle = None

    def _named(self, name: str) -> type[Transport]:
        return self._choose(name) if name and self._choose else self._transport_cls

    @property
    def _device(self) -> torch.device:
        """Of the memory that is received into."""
        return torch.device("cpu") if self._choice.staging == "host" else self.context.device

    def _nearest(self, handles: Sequence[Handle]) -> Handle:
        """That of the trainer's rank whose memory this worker is to read.

        Raises:
            TransportError: None of several is near it.
        """
        if len(handles) == 1:
            return handles[0]
        transport: Any = self._chosen
        backend, device = self.context.backend, self.context.device
        near = [
            handle
            for handle in handles
            if not hasattr(transport, "is_near")
            or transport.is_near(handle.unwrap(backend=backend), device)
        ]
        if not near:
            raise TransportError(
                "No rank of the trainer has its weights where this worker can read them",
                where=f"worker {self.context.rank} on {device}",
                expected="a rank on this worker's GPU",
                got=f"{len(handles)} ranks elsewhere",
                cure="run a rank of the trainer on each GPU that has a worker; connect on all",
            )
        return near[self.context.rank % len(near)]

    def _connect(self, deadline: Deadline) -> None:
        if self._exposure is None or self._slices is None or self._handle is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        self._release_quarantine()
        arena = None
        if self._itinerary is not None:
            arena = self._arena.take(self._itinerary.arena_nbytes, self._choice.staging)
        name = reader_name(self._engine, self.context.rank)
        transport: Any = self._chosen(name, self._device)
        backend = self.context.backend
        try:
            if self._itinerary is None or arena is None:
                self._reading = Mapped(
                    transport,
                    self._exposure,
                    self._slices.runs,
                    self._handle,
                    self._device,
                    backend=backend,
                    deadline=deadline,
                )
                self._watch = threading.Event()
                threading.Thread(
                    target=self._drop_when_dead,
                    args=(self._reading, self._watch),
                    name="vllm-wt-mapped",
                    daemon=True,
                ).start()
            else:
                self._reading = Reading(
                    transport,
                    self._itinerary,
                    arena,
                    self._handle,
                    backend=backend,
                    counted=self._counted,
                    deadline=deadline,
                )
        except BaseException:
            transport.close()
            raise

    def _release_quarantine(self) -> None:
        self._quarantine = [reading for reading in self._quarantine if not reading.close()]

    def _drop_connection(self) -> None:
        with self._in_use:
            self._watch.set()
            reading, self._reading = self._reading, None
            if reading is not None and not reading.close():
                # Something may still write into the arena: it is kept, unused, until that is over.
                self._quarantine.append(reading)
                self._arena.abandon()

    def _drop_when_dead(self, reading: Mapped, stop: threading.Event) -> None:
        """Give the memory of a trainer that has died back: it may want to start again, and need it."""
        while not stop.wait(_DEATH_S):
            with self._in_use:
                if self._reading is not reading:
                    return
                try:
                    reading.check()
                except Exception as error:  # of any class: there is nobody here to raise it to
                    # As text: a log that keeps the error would keep the memory.
                    logger.warning("vllm-wt: the trainer's memory is given back: %s", str(error))
                    self._drop_connection()
                    return
