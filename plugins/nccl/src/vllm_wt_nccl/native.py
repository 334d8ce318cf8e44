"""The native form: vLLM's four calls on the engine, two static methods in the trainer.

The names are those of vLLM's own ``nccl`` backend, so that code for it needs other imports and nothing
else. vLLM is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Aborted, WeightTransferError, WrongOrder
from vllm_wt.native import LoadWeights, WeightTransferEngine, WorkerContext
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_info import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
from vllm_wt_nccl.native_keys import OVER, ROUND
from vllm_wt_nccl.native_meeting import (
    Joining,
    made_together,
    require_one_host,
    told,
    watching,
)
from vllm_wt_nccl.native_members import Member
from vllm_wt_nccl.native_parcels import Packing
from vllm_wt_nccl.native_receiving import Receiving


class NCCLWeightTransferEngine(
    WeightTransferEngine[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]
):
    """Worker side, and the trainer's two functions.

    Args:
        context: Where the worker lives.
    """

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._group: Group | None = None
        self._packing: Packing | None = None
        """Of updates that don't say."""
        self._connecting: Deadline | None = None
        self._receiving: Deadline | None = None
        self._given_up: str | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        init_info.require_supported()
        require_one_host(init_info.master_address)
        deadline = self._connecting = Deadline(_sooner(init_info.deadline_s))
        worker = self._member(init_info)
        joining = Joining(init_info.master_address, init_info.master_port, worker)
        device = self.context.device
        try:
            trainer, _ = joining.join(deadline)
            rendezvous = joining.rendezvous
            assert rendezvous is not None  # it has let this worker in
            communicator = made_together(
                rendezvous, trainer, worker.rank, joining.way, device, deadline
            )
        except BaseException as error:
            joining.fail(told(error, f"The worker of rank {worker.rank}"))
            raise
        self._packing = init_info.packing
        self._group = Group(
            rendezvous,
            communicator,
            rank=worker.rank,
            world_size=trainer.world_size,
            device=device,
        )

    def start_weight_update(self) -> None:
        self._given_up = None

    def receive_weights(
        self, update_info: NCCLWeightTransferUpdateInfo, load_weights: LoadWeights
    ) -> None:
        group, default = self._group, self._packing
        if group is None or default is None:
            raise WrongOrder("No connection to a trainer", cure="init_weight_transfer_engine first")
        deadline = self._receiving = Deadline(_sooner(update_info.deadline_s))
        try:
            self._receive(group, default, update_info, load_weights, deadline)
        finally:
            self._receiving = None

    def _receive(
        self,
        group: Group,
        default: Packing,
        update_info: NCCLWeightTransferUpdateInfo,
        load_weights: LoadWeights,
        deadline: Deadline,
    ) -> None:
        if self._given_up is not None:  # before this thread got here
            deadline.cancel(self._given_up)
        try:
            manifest = update_info.manifest()
        except WeightTransferError as error:
            group.refuse(error)
            raise
        keys = Keys(_begun(group, deadline))
        watch = watching(group.rendezvous, keys.failed, deadline)
        has_begun = False
        try:
            watch()
            group.rendezvous.add(keys.here, 1, deadline)
            what = "The trainer has not begun to send in time: it waits for other workers"
            group.rendezvous.get(keys.call, deadline, what, watch)
            has_begun = True
            packing = update_info.packing(default)
            Receiving(group, manifest, packing, keys.ticket, deadline, watch).run(load_weights)
            group.rendezvous.add(keys.done, 1, deadline)
        except BaseException as error:
            whose = f"The worker of rank {group.rank}"
            first = group.fail(keys, error, whose=whose, has_begun=has_begun)
            if first is error:
                raise
            raise first from error

    def abort_weight_update(self, reason: str) -> None:
        self._given_up = reason
        for deadline in (self._connecting, self._receiving):
            if deadline is not None:
                deadline.cancel(reason)
        if self._receiving is None and self._group is not None:
            # An update that was refused before it got here: the trainer may wait for this worker.
            self._group.refuse(
                Aborted(f"The engine has given the round up: {reason}", cure="send it again")
            )

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _member(self, init_info: NCCLWeightTransferInitInfo) -> Member:
        """This worker, as vLLM's own backend numbers it: among those of all data-parallel replicas."""
        size = self.context.size
        first = init_info.rank_offset + self.context.replica * size
        return Member(
            rank=first + self.context.rank,
            world_size=init_info.world_size,
            first=first,
            workers=size,
            device=self.context.device.type,
        )

    @staticmethod
    def trainer_init(init_info: Any) -> Group:
        """See `vllm_wt_nccl.native_trainer.trainer_init`."""
        from vllm_wt_nccl.native_trainer import trainer_init

        return trainer_init(init_info)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Any
    ) -> None:
        """See `vllm_wt_nccl.native_trainer.trainer_send_weights`."""
        from vllm_wt_nccl.native_trainer import trainer_send_weights

        trainer_send_weights(iterator, trainer_args)


def _begun(group: Group, deadline: Deadline) -> int:
    """Number of the round that the trainer has begun, once it is a new one."""
    group.require_whole(deadline)
    rendezvous = group.rendezvous
    group.last = rendezvous.reached(
        ROUND,
        group.last + 1,
        deadline,
        "The trainer has not begun to send in time",
        watching(rendezvous, OVER, deadline),
    )
    return group.last


def _sooner(seconds: float) -> float:
    """So that what core says of a call that is late is said by who knows what it has waited for."""
    return max(seconds - 1.0, 0.9 * seconds)
