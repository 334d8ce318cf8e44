"""The worker's side: joins the trainer's communicator, and receives what is broadcast."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.engine import LoadWeights, WeightTransferEngine, WorkerContext
from vllm_wt.errors import Aborted, InvalidInfo, WeightTransferError, WrongOrder
from vllm_wt.loading.arena import Arena
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.reception import Reception
from vllm_wt.loading.slices import sliced
from vllm_wt.loading.staging import Intake
from vllm_wt_nccl.bucketing import scheduled
from vllm_wt_nccl.communicator import Communicator
from vllm_wt_nccl.info import Call, NcclInitInfo, NcclUpdateInfo
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.meeting import WORKERS, Watch, decoded, made, tell
from vllm_wt_nccl.quarantine import give_up
from vllm_wt_nccl.receiving import Receiving, arena_nbytes
from vllm_wt_nccl.rendezvous import Rendezvous, local_address
from vllm_wt_nccl.schedule import Schedule
from vllm_wt_nccl.senders import SendersCommunicator

logger = logging.getLogger(__name__)

_GAP = 4 << 10
"""Bytes: what lies between two runs that are needed is copied along, where it is no more."""


class NcclEngine(WeightTransferEngine[NcclInitInfo, NcclUpdateInfo]):
    """Worker side of the backend.

    The communicator is kept over rounds. After a round that failed it is made anew, by all: what a
    fabric for collectives does after an error is anybody's guess.

    Raises:
        InvalidInfo, LoadError: The arena that the environment asks for cannot be had.
    """

    init_info_cls = NcclInitInfo
    update_info_cls = NcclUpdateInfo

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._arena = Arena(context.device)
        self._planned: Reception | None = None
        self._info: NcclInitInfo | None = None
        self._reception: Reception | None = None
        self._receiving: Receiving | None = None
        self._schedule: Schedule | None = None
        self._needed = 0
        """Bytes of memory that an update needs."""
        self._rendezvous: Rendezvous | None = None
        self._number = 0
        """By which this worker is known at the rendezvous."""
        self._communicator: Communicator | None = None
        self._group = 0
        """Those that may still write to the buffers that they hold."""
        self._deadline: Deadline | None = None
        self._given_up: str | None = None

    def plan_receive(self, plan: LoadPlan, init_info: NcclInitInfo) -> Intake:
        self._require_kind(init_info.device)
        slices = sliced(plan, _GAP)
        host = self.context.device.type == "cpu"
        self._planned = Reception.planned(plan, slices, self._arena, init_info.staging, host=host)
        return self._planned.intake

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:
        self._drop()
        planned, self._planned = self._planned, None
        if planned is None:  # nobody has a plan
            self.plan_receive(LoadPlan.of_whole(init_info.manifest(), "no plan"), init_info)
            planned, self._planned = self._planned, None
            assert planned is not None
        self._reception, self._info = planned, init_info
        deadline = Deadline(init_info.deadline_s)
        self._join(deadline)
        self._prepare()
        logger.info(
            "vllm-wt: staging %s (%s), %d bytes", *vars(planned.choice).values(), self._arena.nbytes
        )

    def start_weight_update(self) -> None:
        self._given_up = None

    def receive_weights(self, update_info: NcclUpdateInfo, load_weights: LoadWeights) -> None:
        deadline = self._deadline = Deadline(update_info.deadline_s)
        if self._given_up is not None:  # before this thread got here
            deadline.cancel(self._given_up)
        keys = Keys(update_info.ticket)
        try:
            rendezvous = self._rendezvous or self._join(deadline)
            receiving = self._receiving or self._prepare()
            watch = Watch(rendezvous, keys, deadline)
            if receiving.count:
                assert self._schedule is not None
                self._attend(rendezvous, keys, deadline, watch, self._schedule.senders)
            receiving.run(self._communicator, load_weights, deadline, watch)
            rendezvous.add(keys.done, 1, deadline)
        except BaseException as error:
            self._tell(keys, error)
            self._drop()
            raise

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        if self._deadline is not None:
            self._deadline.cancel(reason)

    def report(self) -> dict[str, Any]:
        """Where it receives and why, the memory held for that, and what an update needs."""
        if self._reception is None:
            return {}
        return {
            "staging": self._reception.choice.staging,
            "why": self._reception.choice.why,
            "arena_nbytes": self._arena.nbytes,
            "needed_nbytes": self._needed,
        }

    def shutdown(self) -> None:
        self._drop()
        self._reception = self._info = None

    def _require_kind(self, trainers: str) -> None:
        """Nothing carries broadcasts from one kind of memory to another."""
        own = self.context.device.type
        if trainers != own:
            raise InvalidInfo(
                "The trainer's weights are in another kind of memory than the engine's",
                where="device",
                expected=own,
                got=trainers,
                cure=f"connect with the weights on {own}, or use another backend",
            )

    def _join(self, deadline: Deadline) -> Rendezvous:
        """Become known to the trainer."""
        if self._info is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        info = self._info
        rendezvous = Rendezvous.join(info.session, info.address, info.port, deadline)
        self._number = rendezvous.add(WORKERS, 1, deadline)
        self._rendezvous = rendezvous
        return rendezvous

    def _prepare(self) -> Receiving:
        if self._info is None or self._reception is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        info, reception, device = self._info, self._reception, self.context.device
        cuts = info.cuts(info.manifest())
        schedule = self._schedule = scheduled(cuts, info.bucket_nbytes, info.verify, device)
        self._needed = arena_nbytes(reception, schedule)
        arena = self._arena.take(self._needed, reception.choice.staging)
        self._receiving = Receiving(schedule, reception, arena, device)
        return self._receiving

    def _attend(
        self,
        rendezvous: Rendezvous,
        keys: Keys,
        deadline: Deadline,
        watch: Watch,
        senders: Sequence[int],
    ) -> None:
        """Say that this worker takes part in a round, and join the communicators that it is for."""
        rendezvous.append(keys.who, f"{self._number} ", deadline)
        rendezvous.add(keys.here, 1, deadline)
        said = rendezvous.get(
            keys.call, deadline, "The trainer has not begun to send in time", watch
        )
        call = Call.from_wire(decoded(said, "a call"), backend=self.context.backend)
        if self._communicator is not None and self._group == call.group:
            return
        self._close_communicator()
        if self._number not in call.members:
            raise Aborted(
                "The trainer sends to others in this round",
                where="rendezvous",
                expected=f"worker {self._number} among them",
                got=f"workers {list(call.members)}",
                cure="push again",
            )
        rank = 1 + call.members.index(self._number)
        address, device = local_address(rendezvous.address), self.context.device
        joined: dict[int, Communicator] = {}
        self._communicator = SendersCommunicator(joined)  # closed with what it has, if one fails
        for sender in senders:  # all workers in the same order
            joined[sender] = made(rendezvous, call, rank, address, device, deadline, sender)
        self._group = call.group

    def _tell(self, keys: Keys, error: BaseException) -> None:
        """The others need not wait for this worker."""
        rendezvous = self._rendezvous
        if rendezvous is None or not isinstance(error, WeightTransferError):
            return
        try:
            tell(rendezvous, keys, error)
        except WeightTransferError as lost:
            logger.warning("vllm-wt: the trainer could not be told: %s", lost)

    def _drop(self) -> None:
        self._close_communicator()
        self._receiving = self._rendezvous = None

    def _close_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not give_up(communicator):
            self._arena.abandon()  # buckets may still come into it
