"""The worker's side of every Transport: pulls what its plan needs into an arena of its own."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any, Final

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import LoadWeights, WeightTransferEngine, WorkerContext
from vllm_wt.errors import WrongOrder
from vllm_wt.info import Handle, PullInitInfo, PullUpdateInfo
from vllm_wt.loading.arena import Arena, Choice
from vllm_wt.loading.batches import batches
from vllm_wt.loading.plan import GAP, LoadPlan
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.loading.staging import Intake
from vllm_wt.packing import Layout
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.itinerary import Itinerary
from vllm_wt.pull.reading import Reading
from vllm_wt.transport import Transport

logger = logging.getLogger(__name__)

STREAMED_NBYTES: Final = 256 << 20
"""About what is received at a time where an update is loaded while it arrives."""
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

    Raises:
        InvalidInfo, LoadError: The arena that the environment asks for cannot be had.
    """

    init_info_cls = PullInitInfo
    update_info_cls = PullUpdateInfo

    def __init__(self, context: WorkerContext, transport_cls: type[Transport]) -> None:
        super().__init__(context)
        self._transport_cls = transport_cls
        self._arena = Arena(context.device)
        self._planned: tuple[Slices, Choice, Sequence[Sequence[str]]] | None = None
        self._itinerary: Itinerary | None = None
        self._choice = Choice("device", "nothing is received yet")
        self._handle: Handle | None = None
        self._counted = True
        self._reading: Reading | None = None
        self._quarantine: list[Reading] = []
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
        properties = self._transport_cls.properties
        exposure = Exposure.of(init_info, plan.manifest)
        alignment = properties.alignment
        slices = sliced(
            plan,
            properties.gaps.get(self.context.device.type, GAP),
            max(BLOCK, alignment) if exposure.digested else alignment,
            properties.max_descriptors,
        )
        needed = Layout(slices.plan.manifest, alignment=BLOCK).nbytes
        choice = self._arena.choose(init_info.staging, needed, host="cpu" in properties.memory)
        names = tuple(tensor.name for tensor in slices.plan.manifest.tensors)
        streamed = choice.staging == "none"
        parts = _parts(plan, frozenset(names)) if streamed else (names,)
        self._planned = (slices, choice, parts)
        return Intake(slices.plan, parts if streamed else None)

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self._drop_connection()
        manifest = init_info.manifest()
        planned, self._planned = self._planned, None
        if planned is None:  # nobody has a plan
            self.plan_receive(LoadPlan.of_whole(manifest, "no plan"), init_info)
            planned, self._planned = self._planned, None
            assert planned is not None
        slices, self._choice, parts = planned
        properties = self._transport_cls.properties
        self._handle = init_info.handle
        self._counted = init_info.verify != "off"
        self._itinerary = Itinerary(
            Exposure.of(init_info, manifest),
            slices,
            parts,
            owner=init_info.handle.owner,
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
        try:
            if update_info.handle is not None:
                self._drop_connection()
                self._handle = update_info.handle
            if self._reading is None:
                self._connect(deadline)
            assert self._reading is not None
            self._reading.run(update_info.ticket, load_weights, deadline)
        except BaseException:
            self._drop_connection()
            raise

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        if self._receiving is not None:
            self._receiving.cancel(reason)

    def report(self) -> dict[str, Any]:
        """Where it receives and why, the memory held for that, and what an update needs of it.

        What is held is the peak, too: it grows before a round, and is kept. Only the memory of a
        round that failed, while a fabric may still write to it, comes on top.
        """
        needed = 0 if self._itinerary is None else self._itinerary.arena_nbytes
        return {
            "staging": self._choice.staging,
            "why": self._choice.why,
            "arena_nbytes": self._arena.nbytes,
            "needed_nbytes": needed,
        }

    def shutdown(self) -> None:
        self._drop_connection()
        self._release_quarantine()
        self._itinerary = self._handle = None

    @property
    def _device(self) -> torch.device:
        """Of the memory that is received into."""
        return torch.device("cpu") if self._choice.staging == "host" else self.context.device

    def _connect(self, deadline: Deadline) -> None:
        if self._itinerary is None or self._handle is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        self._release_quarantine()
        arena = self._arena.take(self._itinerary.arena_nbytes, self._choice.staging)
        name = f"worker{self.context.rank}-{uuid.uuid4().hex[:12]}"
        transport = self._transport_cls(name, self._device)
        try:
            self._reading = Reading(
                transport,
                self._itinerary,
                arena,
                self._handle,
                backend=self.context.backend,
                counted=self._counted,
                deadline=deadline,
            )
        except BaseException:
            transport.close()
            raise

    def _release_quarantine(self) -> None:
        self._quarantine = [reading for reading in self._quarantine if not reading.close()]

    def _drop_connection(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and not reading.close():
            # Something may still write into the arena: it is kept, unused, until that is over.
            self._quarantine.append(reading)
            self._arena.abandon()


def _parts(plan: LoadPlan, needed: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """What is received at a time: cut by the sizes of full tensors, so that all ranks cut alike."""
    cut = ([name for name in part if name in needed] for part in batches(plan, STREAMED_NBYTES))
    return tuple(tuple(part) for part in cut if part)
