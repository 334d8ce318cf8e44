"""The worker's side: takes the pieces that it needs from each rank that has them."""

from __future__ import annotations

import logging
from typing import Any

from vllm_wt import registry
from vllm_wt.backends import transport_named
from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import LoadWeights, WeightTransferEngine, WorkerContext
from vllm_wt.errors import InvalidInfo, LoadError, WrongOrder
from vllm_wt.info import Handle
from vllm_wt.loading.arena import Arena, Choice
from vllm_wt.loading.plan import GAP, LoadPlan
from vllm_wt.loading.staging import Intake
from vllm_wt.spec import Kind
from vllm_wt.transport import Transport
from vllm_wt_sharded.info import ShardedInitInfo, ShardedUpdateInfo
from vllm_wt_sharded.layout import BACKEND
from vllm_wt_sharded.reading import Readings
from vllm_wt_sharded.reception import Reception, reception

logger = logging.getLogger(__name__)


class ShardedEngine(WeightTransferEngine[ShardedInitInfo, ShardedUpdateInfo]):
    """Worker side of the backend.

    A connection is made to each rank of the trainer that this worker takes something from, and kept
    over rounds. When memory of any of these has moved, and after a round that failed, all are made
    anew.

    Args:
        context: Where the worker lives.

    Raises:
        InvalidInfo, LoadError: The arena that the environment asks for cannot be had.
    """

    init_info_cls = ShardedInitInfo
    update_info_cls = ShardedUpdateInfo

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._arena = Arena(context.device)
        self._planned: Reception | None = None
        self._reception: Reception | None = None
        self._choice = Choice("device", "nothing is received yet")
        self._info: ShardedInitInfo | None = None
        self._handles: tuple[Handle, ...] = ()
        """By rank, as they were told last."""
        self._readings: Readings | None = None
        self._quarantine: list[Readings] = []
        """Those that may still write to the memory that they hold."""
        self._deadline: Deadline | None = None
        self._given_up: str | None = None

    def plan_receive(self, plan: LoadPlan, init_info: ShardedInitInfo) -> Intake:
        properties = _transport(init_info).properties
        aligned = properties.alignment
        self._planned = reception(
            plan,
            init_info,
            worker=self.context.rank,
            gap=properties.gaps.get(self.context.device.type, GAP),
            alignment=max(BLOCK, aligned) if init_info.verify == "digest" else aligned,
            most=properties.max_descriptors,
        )
        self._choice = self._arena.choose(
            init_info.staging, self._planned.nbytes, host="cpu" in properties.memory
        )
        if self._choice.staging == "none":
            raise LoadError(
                "This backend receives everything before it is loaded, and there is no memory for that",
                backend=BACKEND,
                where="staging",
                expected='"device" or "host"',
                got=f"none: {self._choice.why}",
                cure="leave more memory free (gpu_memory_utilization), or reserve it with "
                "VLLM_WT_ARENA",
            )
        return self._planned.intake

    def init_transfer_engine(self, init_info: ShardedInitInfo) -> None:
        self._drop()
        planned, self._planned = self._planned, None
        if planned is None:  # nobody has a plan
            self.plan_receive(LoadPlan.of_whole(init_info.manifest(), "no plan"), init_info)
            planned, self._planned = self._planned, None
            assert planned is not None
        self._reception, self._info = planned, init_info
        self._handles = tuple(owner.handle for owner in init_info.owners)
        self._connect(Deadline(init_info.deadline_s))
        logger.info(
            "vllm-wt: staging %s (%s), %d bytes, from %d ranks",
            *vars(self._choice).values(),
            self._arena.nbytes,
            len(planned.parts),
        )

    def start_weight_update(self) -> None:
        self._given_up = None

    def receive_weights(self, update_info: ShardedUpdateInfo, load_weights: LoadWeights) -> None:
        deadline = self._deadline = Deadline(update_info.deadline_s)
        if self._given_up is not None:  # before this thread got here
            deadline.cancel(self._given_up)
        try:
            if update_info.handles:
                self._take_handles(update_info.handles)
            readings = self._readings or self._connect(deadline)
            load_weights(readings.run(update_info.ticket, deadline))
        except BaseException:
            self._drop()
            raise

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        if self._deadline is not None:
            self._deadline.cancel(reason)

    def report(self) -> dict[str, Any]:
        """Which ranks it reads, where it receives and why, the memory held for that, and what an update
        needs."""
        if self._reception is None:
            return {}
        return {
            "owner": ",".join(self._handles[part.rank].owner for part in self._reception.parts),
            "staging": self._choice.staging,
            "why": self._choice.why,
            "arena_nbytes": self._arena.nbytes,
            "needed_nbytes": self._reception.nbytes,
        }

    def shutdown(self) -> None:
        self._drop()
        self._release_quarantine()
        self._reception = self._info = None
        self._handles = ()

    def _take_handles(self, handles: tuple[Handle, ...]) -> None:
        if len(handles) != len(self._handles):
            raise InvalidInfo(
                "The trainer has another number of ranks than when it connected",
                backend=BACKEND,
                where="handles",
                expected=len(self._handles),
                got=len(handles),
                cure="connect again",
            )
        if handles != self._handles:
            self._drop()
            self._handles = handles

    def _connect(self, deadline: Deadline) -> Readings:
        if self._reception is None or self._info is None:
            raise WrongOrder("No connection to a trainer", cure="connect first")
        self._release_quarantine()
        arena = self._arena.take(self._reception.nbytes, self._choice.staging)
        self._readings = Readings(
            self._reception,
            arena,
            self._handles,
            _transport(self._info),
            engine=self._info.engine,
            worker=self.context.rank,
            backend=self.context.backend,
            counted=self._info.verify != "off",
            deadline=deadline,
        )
        return self._readings

    def _release_quarantine(self) -> None:
        self._quarantine = [readings for readings in self._quarantine if not readings.close()]

    def _drop(self) -> None:
        readings, self._readings = self._readings, None
        if readings is not None and not readings.close():
            # Something may still write into the arena: it is kept, unused, until that is over.
            self._quarantine.append(readings)
            self._arena.abandon()


def _transport(info: ShardedInitInfo) -> type[Transport]:
    """What moves the bytes.

    Raises:
        InvalidInfo: It is not installed here, or is none.
        BackendUnavailable, PluginError: It cannot be used here.
    """
    spec = registry.default().get(info.over).spec
    if spec.kind is not Kind.TRANSPORT:
        raise InvalidInfo(
            f"Backend {info.over!r} cannot move bytes for another one",
            backend=BACKEND,
            where="over",
            expected="a backend of kind transport",
            got=f"one of kind {spec.kind.value}",
            cure="install the same release on both sides",
        )
    return transport_named(spec, info.transport)
