"""A sound pair of engines over the echo backend's fabric, and pairs that are broken in one way each."""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mutant import caught_by
from pydantic import ConfigDict
from transports import DiesWithAReader, LeaksAFileAPass

from vllm_wt.deadline import Deadline
from vllm_wt.engine import (
    LoadWeights,
    WeightTransferEngine,
    WorkerContext,
)
from vllm_wt.errors import PeerDead, TransportError, WeightTransferError
from vllm_wt.info import InitInfo, Op, PullInitInfo, PullUpdateInfo, UpdateInfo
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES, as_bytes
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.source import WeightSource
from vllm_wt.transport import Transport
from vllm_wt_echo.transport import EchoTransport

Weights = list[tuple[str, torch.Tensor]]


class SoundEngine(PullEngine):
    """The worker's side; nothing is wrong with it."""

    transport: type[Transport] = EchoTransport

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context, self.transport)


class SoundTrainer(PullTrainer):
    """The trainer's side; nothing is wrong with it."""

    transport: type[Transport] = EchoTransport

    def __init__(self, source: WeightSource, *, backend: str, **options: Any) -> None:
        super().__init__(source, backend=backend, transport_cls=self.transport, **options)


class Altering(SoundEngine):
    """Hands over other tensors than it has received."""

    def altered(self, weights: Weights) -> Weights:
        raise NotImplementedError

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        def load_altered(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            load_weights(self.altered(list(weights)))

        super().receive_weights(update_info, load_altered)


class Remembering(Altering):
    """Keeps what a round has brought."""

    last: Weights = []  # noqa: RUF012

    def altered(self, weights: Weights) -> Weights:
        self.last = [(name, tensor.clone()) for name, tensor in weights]
        return weights


class OtherSource(WeightSource):
    """The tensors of another source, each one changed.

    Args:
        source: The other one.
        change: What is done to a tensor.
    """

    def __init__(self, source: WeightSource, change: Any) -> None:
        self._source, self._change = source, change

    def manifest(self) -> Manifest:
        return self._source.manifest()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            yield name, self._change(name, tensor)


# -- what arrives ------------------------------------------------------------------------------


@caught_by("test_every_dtype_arrives_bit_for_bit", "another form than announced")
class LosesTheDtype(Altering):
    """Hands bfloat16 over as float32."""

    def altered(self, weights: Weights) -> Weights:
        return [(n, t.float() if t.dtype is torch.bfloat16 else t) for n, t in weights]


@caught_by("test_every_dtype_arrives_bit_for_bit", "are wrong")
class LosesPayloadsOfNans(Altering):
    """Makes all NaNs of float16 the same."""

    def altered(self, weights: Weights) -> Weights:
        return [
            (n, torch.where(t.isnan(), torch.nan, t) if t.dtype is torch.float16 else t)
            for n, t in weights
        ]


@caught_by("test_scalars_arrive", "another form than announced")
class ScalarsGetADimension(Altering):
    """Hands scalars over as vectors of one element."""

    def altered(self, weights: Weights) -> Weights:
        return [(n, t if t.dim() else t.reshape(1)) for n, t in weights]


@caught_by("test_tensors_without_elements_arrive", "not complete")
class LeavesOutTheEmpty(Altering):
    """Leaves out tensors without elements."""

    def altered(self, weights: Weights) -> Weights:
        return [(n, t) for n, t in weights if t.numel()]


def _in_storage_order(_: str, tensor: torch.Tensor) -> torch.Tensor:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(tensor.shape)


@caught_by("test_tensors_that_are_not_contiguous_arrive", "'transposed'")
class SendsInStorageOrder(SoundTrainer):
    """Sends the elements of a tensor as they lie in memory."""

    def __init__(self, source: WeightSource, **options: Any) -> None:
        super().__init__(OtherSource(source, _in_storage_order), **options)


@caught_by("test_large_and_odd_tensors_arrive", "'large'")
class BreaksAbove16MiB(Altering):
    """Fills what lies beyond 16 MiB of a tensor with zeros."""

    def altered(self, weights: Weights) -> Weights:
        for _, tensor in weights:
            if tensor.numel():
                as_bytes(tensor)[16 << 20 :] = 0
        return weights


@caught_by("test_ten_thousand_tensors_arrive", "not complete")
class BreaksAbove8192Tensors(Altering):
    """Hands over the first 8192 tensors."""

    def altered(self, weights: Weights) -> Weights:
        return weights[:8192]


@caught_by("test_each_is_given_once_in_order", r"names\(\) == list")
class ReordersTensors(Altering):
    """Hands tensors over by name."""

    def altered(self, weights: Weights) -> Weights:
        return sorted(weights, key=lambda item: item[0])


@caught_by("test_each_is_given_once_in_order", "received already")
class GivesATensorTwice(Altering):
    """Hands the first tensor over again."""

    def altered(self, weights: Weights) -> Weights:
        return [*weights, weights[0]]


@caught_by("test_each_is_given_once_in_order", "not complete")
class DropsTheLastTensor(Altering):
    """Returns as if complete, without the last tensor."""

    def altered(self, weights: Weights) -> Weights:
        return weights[:-1]


# -- rounds ------------------------------------------------------------------------------------


@caught_by("test_new_values_arrive_each_round", "are wrong")
class FirstValuesForEver(Altering):
    """Hands over what the first round has brought, in every round."""

    first: Weights | None = None

    def altered(self, weights: Weights) -> Weights:
        self.first = self.first or [(name, tensor.clone()) for name, tensor in weights]
        return self.first


@caught_by("test_new_values_arrive_each_round", "are wrong")
class OverwritesWhatItGave(Altering):
    """Uses the memory that it has handed over before the round is finished."""

    given: Weights = []  # noqa: RUF012

    def altered(self, weights: Weights) -> Weights:
        self.given = weights
        return weights

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        super().receive_weights(update_info, load_weights)
        for _, tensor in self.given:
            tensor.zero_()


@caught_by("test_the_trainer_s_tensors_are_not_written_to", r"trainer.digests\(\) ==")
class WritesToTheTrainer(SoundTrainer):
    """Leaves its mark in the trainer's tensors at the end of a round."""

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        info = super().update_info(op, deadline, known=known)
        if op == "seal":
            for _, tensor in self.source:
                tensor.zero_()
        return info


@caught_by("test_memory_that_has_moved_arrives", "are wrong")
class IgnoresMovedMemory(SoundTrainer):
    """Serves the memory that tensors had at first, for ever."""

    def __init__(self, source: WeightSource, **options: Any) -> None:
        first = {name: tensor.detach() for name, tensor in source}
        super().__init__(OtherSource(source, lambda name, _: first[name]), **options)


@caught_by("test_values_of_two_publishes_do_not_mix", "are wrong|version|Revoked|ticket")
class ResumesAGivenUpRound(SoundTrainer):
    """Goes on with what it published for a round that was given up."""

    def __init__(self, source: WeightSource, **options: Any) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        super().__init__(OtherSource(source, self.kept.get), **options)
        self.given_up = source

    def publish(self, version: int, deadline: Deadline) -> None:
        if version == 1 or self.delivered():
            self.kept.update((name, tensor.clone()) for name, tensor in self.given_up)
        super().publish(version, deadline)

    def describe(self, deadline: Deadline) -> InitInfo:
        self.kept.update(self.given_up)
        return super().describe(deadline)


@caught_by("test_delivered_counts_those_that_have_everything", r"delivered\(\) == 0")
class DeliveredTooEarly(SoundTrainer):
    """Says that a worker has everything as soon as it is published."""

    published = 0

    def publish(self, version: int, deadline: Deadline) -> None:
        super().publish(version, deadline)
        self.published = version

    def delivered(self) -> int:
        return int(self.published > 0)


@caught_by("test_delivered_counts_those_that_have_everything", r"delivered\(\) == 0")
class DeliveredOnceForAll(SoundTrainer):
    """Counts the workers that have everything of an earlier publish."""

    most = 0

    def delivered(self) -> int:
        self.most = max(self.most, super().delivered())
        return self.most


# -- failures ----------------------------------------------------------------------------------


@caught_by("test_a_trainer_that_has_gone_is_not_connected_to", "`init` has not returned within")
class WaitsForTheDead(SoundEngine):
    """Tries to connect until there is a trainer."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        while True:
            with suppress(PeerDead):
                return super().init_transfer_engine(init_info)
            time.sleep(0.05)


@caught_by(
    "test_a_trainer_that_is_stopped_is_connected_to_in_time_or_not",
    "`init` has not returned within",
)
class InitWithoutDeadline(SoundEngine):
    """Waits for a trainer for ever."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        super().init_transfer_engine(replace(init_info, deadline_s=600.0))


@caught_by("test_a_trainer_waits_for_no_worker", "`publish` has not returned within")
class PublishWaits(SoundTrainer):
    """Publishes once a worker is there to receive it."""

    def publish(self, version: int, deadline: Deadline) -> None:
        super().publish(version, deadline)
        while not self.delivered():
            time.sleep(0.01)


@caught_by("test_a_trainer_that_is_killed_before_a_receive", "without everything")
class SwallowsErrors(SoundEngine):
    """Returns from a receive that has failed as if all was well."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        with suppress(WeightTransferError):
            super().receive_weights(update_info, load_weights)


@caught_by("test_a_trainer_that_is_killed_after_a_round", "from a trainer that was killed")
class GivesTheLastRoundAgain(Remembering):
    """Hands over what the last round has brought when its trainer has gone."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        try:
            super().receive_weights(update_info, load_weights)
        except WeightTransferError:
            if not self.last:
                raise
            load_weights(self.last)


@caught_by("test_a_trainer_that_is_killed_during_a_receive", r"received == digests|Differing items")
class GivesWhatThereIs(SoundEngine):
    """Hands over zeros where the trainer has gone before it had sent everything."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self.tensors = init_info.manifest().tensors
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        try:
            super().receive_weights(update_info, load_weights)
        except WeightTransferError:
            load_weights(
                (t.name, torch.zeros(t.shape, dtype=DTYPES[t.dtype])) for t in self.tensors
            )


@caught_by("test_a_trainer_that_is_stopped_ends_a_receive_in_time", "has not returned within")
class ReceiveWithoutDeadline(SoundEngine):
    """Receives for as long as it takes."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        super().receive_weights(replace(update_info, deadline_s=600.0), load_weights)


@caught_by("test_a_trainer_that_goes_on_has_only_been_slow", "Timeout")
class ImpatientEngine(SoundEngine):
    """Receives for a tenth of a second at most."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        super().receive_weights(replace(update_info, deadline_s=0.1), load_weights)


@caught_by("test_a_receive_is_given_up", "`update` has not returned|goes on after abort")
class NeverGivesUp(SoundEngine):
    """Does nothing when a round is given up."""

    def abort_weight_update(self, reason: str) -> None:
        pass


@caught_by("test_an_abort_when_nothing_is_received_does_nothing", "Given up")
class GivesUpForGood(SoundEngine):
    """Gives every round up once one was."""

    def start_weight_update(self) -> None:
        pass


@caught_by("test_a_worker_that_dies_takes_no_trainer_with_it", "OSError: a reader has gone")
class ServeDiesWithAWorker(SoundTrainer):
    """Serves no more when a worker has gone."""

    transport = DiesWithAReader


@caught_by("test_a_second_trainer_replaces_the_first", "has a trainer")
class OneTrainerOnly(SoundEngine):
    """Fails when a second trainer connects."""

    session: str | None = None

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        if self.session not in {None, init_info.session}:
            raise RuntimeError("This engine has a trainer")
        self.session = init_info.session
        super().init_transfer_engine(init_info)


@caught_by("test_a_worker_is_shut_down_twice_and_connected_again", "AttributeError")
class ShutsDownOnce(SoundEngine):
    """Fails when it is shut down again."""

    def shutdown(self) -> None:
        super().shutdown()
        del self._receiving


@caught_by("test_a_worker_is_shut_down_twice_and_connected_again", "DID NOT RAISE")
class ReceivesAfterShutdown(Remembering):
    """Hands over what it has when it is shut down."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        try:
            super().receive_weights(update_info, load_weights)
        except WeightTransferError:
            load_weights(self.last)


@caught_by("test_a_receive_without_a_trainer_is_a_typed_error", "AttributeError")
class ReceivesBlindly(SoundEngine):
    """Takes it for granted that it has a trainer."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self.owner = init_info.handle.owner
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        if self.owner:
            super().receive_weights(update_info, load_weights)


@caught_by("test_a_trainer_is_shut_down_twice", "shut down already")
class TrainerShutsDownOnce(SoundTrainer):
    """Fails when it is shut down again."""

    over = False

    def shutdown(self) -> None:
        if self.over:
            raise RuntimeError("It is shut down already")
        self.over = True
        super().shutdown()


@caught_by("test_a_worker_is_shut_down_with_its_trainer_dead", "PeerDead")
class SaysGoodbye(SoundEngine):
    """Wants an answer of its trainer when it is shut down."""

    info: PullInitInfo | None = None

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        self.info = init_info
        super().init_transfer_engine(init_info)

    def shutdown(self) -> None:
        super().shutdown()
        if self.info is not None:
            handle = self.info.handle
            body = handle.unwrap(backend=self.context.backend)
            goodbye = EchoTransport("goodbye", self.context.device)
            goodbye.open(handle.owner, handle.generation, body, Deadline(1.0))
            goodbye.close()


@caught_by("test_two_workers_receive_a_publish", "rank 1 has no memory")
class FailsOnOneRank(SoundEngine):
    """Fails on one of the workers."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        super().receive_weights(update_info, load_weights)
        if self.context.rank:
            raise TransportError(f"rank {self.context.rank} has no memory", cure="none")


@caught_by("test_two_workers_receive_a_publish", "of rank 1 are wrong")
class FirstRankOnly(Altering):
    """Brings the values to one of the workers, and zeros to the others."""

    def altered(self, weights: Weights) -> Weights:
        return [(n, torch.zeros_like(t) if self.context.rank else t) for n, t in weights]


@caught_by(
    "test_a_worker_that_dies_does_not_hold_up_the_other",
    "has not returned|RuntimeError|could not agree",
)
class WaitsForAllRanks(SoundEngine):
    """Receives when all workers do."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        if self.context.size > 1:
            dist.barrier()
        super().receive_weights(update_info, load_weights)


# -- infos -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _LaxInit(PullInitInfo):
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True, kw_only=True)
class _LaxUpdate(PullUpdateInfo):
    __pydantic_config__ = ConfigDict(extra="forbid", strict=False)


@dataclass(frozen=True, kw_only=True)
class _KeyedUpdate(PullUpdateInfo):
    places: dict[Any, int] = field(default_factory=lambda: {0: 1})


@caught_by("test_an_init_info_of_another_form_is_refused", "DID NOT RAISE|Hang: .*`init`|Timeout")
class IgnoresUnknownFields(SoundEngine):
    """Takes init infos with fields too many."""

    init_info_cls = _LaxInit


@caught_by(
    "test_an_update_info_of_another_form_is_refused",
    "DID NOT RAISE|WrongOrder|does not name",
)
class ConvertsFields(SoundEngine):
    """Takes update infos with values of other types."""

    update_info_cls = _LaxUpdate


@caught_by("test_the_infos_are_dataclasses_that_survive_json", "another one after JSON")
class InfosChangeOnTheWay(SoundTrainer):
    """Has numbers as keys, which are text in JSON."""

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        info = super().update_info(op, deadline, known=known)
        return _KeyedUpdate(**vars(info)) if op == "confirm" else info


@caught_by("test_the_infos_are_dataclasses_that_survive_json", "no frozen dataclass")
class InfoOfItsOwn(SoundEngine):
    """Has an update info that derives from the wrong class."""

    update_info_cls = PullInitInfo  # type: ignore[assignment]


@caught_by("test_an_init_info_of_damaged_values_is_survived", "broken for good")
class BreaksAtADamagedInfo(SoundEngine):
    """Works no more once an init has failed."""

    broken = False

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        if self.broken:
            raise TransportError("It is broken for good", cure="none")
        self.broken = True
        super().init_transfer_engine(init_info)
        self.broken = False


@caught_by("test_an_unknown_option_is_refused", "DID NOT RAISE")
class TakesAnyOption(SoundTrainer):
    """Ignores options that it does not know."""

    def __init__(self, source: WeightSource, *, backend: str, **options: Any) -> None:
        super().__init__(source, backend=backend)


# -- hygiene -----------------------------------------------------------------------------------


@caught_by("test_a_hundred_rounds_leave_nothing_behind", "the trainer has .* more MiB")
class LeaksMemoryARound(SoundTrainer):
    """Keeps what it has published."""

    def __init__(self, source: WeightSource, **options: Any) -> None:
        super().__init__(source, **options)
        self.kept: list[torch.Tensor] = []

    def publish(self, version: int, deadline: Deadline) -> None:
        super().publish(version, deadline)
        self.kept.append(torch.ones(4 << 20, dtype=torch.uint8))


@caught_by("test_a_hundred_rounds_leave_nothing_behind", "worker 0 has .* more files")
class LeaksAFileARound(SoundEngine):
    """Leaves an open file behind for each round."""

    transport = LeaksAFileAPass


@caught_by("test_connections_leave_nothing_behind", "worker 0 has .* more threads")
class LeaksAThreadAConnection(SoundEngine):
    """Leaves a thread behind for each connection."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        super().init_transfer_engine(init_info)


@caught_by("test_rounds_that_are_given_up_leave_nothing_behind", "more files")
class LeaksAFileAnAbort(SoundEngine):
    """Leaves an open file behind for each receive that fails."""

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        file = os.open(os.devnull, os.O_RDONLY)
        super().receive_weights(update_info, load_weights)
        os.close(file)


@caught_by("test_nothing_is_unpickled", r"unpickled\(\) == \[\]")
class UnpicklesNames(Altering):
    """Pickles names of tensors, and back."""

    def altered(self, weights: Weights) -> Weights:
        return [(pickle.loads(pickle.dumps(name)), tensor) for name, tensor in weights]


@caught_by(
    "test_nothing_is_unpickled",
    r"unpickled\(\) == \[\]",
)
class UnpicklesTensors(Altering):
    """Pickles tensors, and back, as a queue between processes does."""

    def altered(self, weights: Weights) -> Weights:
        return [(name, pickle.loads(pickle.dumps(tensor))) for name, tensor in weights]


@caught_by(
    "test_nothing_is_unpickled",
    r"unpickled\(\) == \[\]",
)
class UnpicklesWithCare(Altering):
    """Has an unpickler of its own, which allows less."""

    def altered(self, weights: Weights) -> Weights:
        class Careful(pickle.Unpickler):
            pass

        return [(Careful(io.BytesIO(pickle.dumps(n))).load(), t) for n, t in weights]


# -- packages ----------------------------------------------------------------------------------


@caught_by("test_the_classes_exist_and_have_the_methods", "lacks .'shutdown'")
class LacksShutdown(WeightTransferEngine[PullInitInfo, PullUpdateInfo]):
    """Has no shutdown."""

    def init_transfer_engine(self, init_info: PullInitInfo) -> None:
        pass

    def receive_weights(self, update_info: PullUpdateInfo, load_weights: LoadWeights) -> None:
        pass

    def abort_weight_update(self, reason: str) -> None:
        pass


@caught_by("test_the_classes_exist_and_have_the_methods", "cannot be called as")
class UpdateInfoWithoutKnown(SoundTrainer):
    """Has an update_info that is not told what workers know."""

    def update_info(self, op: Op, deadline: Deadline) -> UpdateInfo:  # type: ignore[override]
        return super().update_info(op, deadline, known=0)


@caught_by("test_one_byte_that_changed_arrives", "assert")
class DeltaByHead(Altering):
    """Takes a tensor whose first values have not changed for one that has not."""

    last: ClassVar[dict[str, torch.Tensor]] = {}

    def altered(self, weights: Weights) -> Weights:
        now = {name: tensor.clone() for name, tensor in weights}
        for name, tensor in now.items():
            last = self.last.get(name)
            if last is not None and torch.equal(as_bytes(tensor)[:2], as_bytes(last)[:2]):
                now[name] = last
        self.last.update(now)
        return list(now.items())


@caught_by("test_a_receive_is_given_up", "are wrong")
class StaleAfterAnAbort(Altering):
    """Gives the second round again in the third one after an abort."""

    rounds: int | None = None
    last: ClassVar[Weights] = []

    def abort_weight_update(self, reason: str) -> None:
        self.rounds = 0
        super().abort_weight_update(reason)

    def altered(self, weights: Weights) -> Weights:
        now = [(name, tensor.clone()) for name, tensor in weights]
        if self.rounds is not None:
            self.rounds += 1
        if self.rounds == 3:
            return self.last
        self.last = now
        return now


@caught_by("test_delivered_counts_each_worker", "one of two workers receives")
class CountsTheConnected(SoundTrainer):
    """Once one worker has reported, counts all that are connected."""

    def delivered(self) -> int:
        reported = super().delivered()
        return len(self._transport._readers) if reported and self._transport else 0


@caught_by("test_tensors_that_share_memory_arrive", "are wrong|differ|OutOfBounds|bytes")
class ByAddress(SoundTrainer):
    """Knows tensors by their address: of those that begin at the same one, the last."""

    def _buffers(self) -> Any:
        buffers = super()._buffers()
        places = {buffer.data_ptr(): buffer for buffer in buffers}
        return [places[buffer.data_ptr()] for buffer in buffers]
