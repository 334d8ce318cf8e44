"""WT-41 to WT-48: trainers and workers that die, stop, are replaced or shut down."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from vllm_wt.errors import CorruptTransfer, WeightTransferError
from vllm_wt.spec import Capability
from vllm_wt.testing.conformance.content import digests
from vllm_wt.testing.conformance.gate import needs
from vllm_wt.testing.conformance.harness import LONG_S, SHORT_S, Harness, Sync, until
from vllm_wt.testing.conformance.process import MOMENTS_S, BrokenContract

_WHILE_S = 3.0
"""Longer than what a fabric may give up after on its own."""
_IN_TIME = SHORT_S + MOMENTS_S


class FailureChecks:
    def test_a_trainer_that_has_gone_is_not_connected_to(self, harness: Harness) -> None:
        """WT-41"""
        trainer, [worker] = harness.trainer(), harness.workers()
        info = trainer.describe(SHORT_S)
        trainer.kill()
        with pytest.raises(WeightTransferError):
            worker.init(info, within=_IN_TIME)
        _require_sync_works(harness, [worker])

    def test_a_trainer_that_is_stopped_is_connected_to_in_time_or_not(
        self, harness: Harness
    ) -> None:
        """WT-41"""
        trainer, [worker] = harness.trainer(), harness.workers()
        info = trainer.describe(SHORT_S)
        trainer.serve()
        trainer.stop()
        with suppress(WeightTransferError):
            worker.init(info, within=_IN_TIME)
        trainer.go_on()
        _require_sync_works(harness, [worker])

    def test_a_trainer_waits_for_no_worker(self, harness: Harness) -> None:
        """WT-41"""
        trainer = harness.trainer()
        trainer.describe(SHORT_S, within=_IN_TIME)
        trainer.serve()
        trainer.publish(1, SHORT_S, within=_IN_TIME)
        for op in ("open", "poll"):
            trainer.update_info(op, SHORT_S, 0, within=_IN_TIME)
        assert trainer.delivered() == 0
        trainer.pause()
        trainer.shutdown()

    def test_a_trainer_that_is_killed_before_a_receive(self, harness: Harness) -> None:
        """WT-42"""
        sync = harness.sync()
        infos = _infos(sync, SHORT_S)
        sync.trainer.kill()
        _require_fails_or_complete(sync, infos, may_complete=False)
        _require_sync_works(harness, sync.workers)

    def test_a_trainer_that_is_killed_after_a_round(self, harness: Harness) -> None:
        """WT-42: the connection is in use."""
        sync = harness.sync()
        sync.push()
        infos = _infos(sync, SHORT_S)
        sync.trainer.kill()
        _require_fails_or_complete(sync, infos, may_complete=False)
        assert sync.wrong(1) is None
        _require_sync_works(harness, sync.workers)

    def test_a_trainer_that_is_killed_during_a_receive(self, harness: Harness) -> None:
        """WT-42"""
        sync = harness.sync(kind="sizes")
        init, update = _infos(sync, SHORT_S)
        call = sync.worker.begin("receive", _IN_TIME, init, update)
        sync.trainer.kill()
        _require_failed_or_right(sync, call.result)
        _require_sync_works(harness, sync.workers)

    def test_a_trainer_that_is_stopped_ends_a_receive_in_time(self, harness: Harness) -> None:
        """WT-42"""
        sync = harness.sync()
        sync.push()
        infos = _infos(sync, SHORT_S)
        sync.trainer.stop()
        _require_fails_or_complete(sync, infos, may_complete=True)
        sync.trainer.go_on()
        _require_sync_works(harness, sync.workers)

    def test_a_trainer_that_goes_on_has_only_been_slow(self, harness: Harness) -> None:
        """WT-42"""
        sync = harness.sync(kind="sizes")
        sync.begin()
        info = sync.trainer.update_info("open", LONG_S, 0)
        sync.trainer.stop()
        sync.worker.update(info)
        time.sleep(_WHILE_S)
        sync.trainer.go_on()
        sync.await_delivery()
        sync.step("seal")
        sync.trainer.pause()
        sync.on_workers("finish", 5)
        assert sync.wrong(1) is None

    def test_a_receive_is_given_up(self, harness: Harness) -> None:
        """WT-43, WT-44"""
        sync = harness.sync(kind="sizes")
        sync.push()
        sync.begin()
        opening, abort = (sync.trainer.update_info(op, 60.0, 0) for op in ("open", "abort"))
        sync.trainer.stop()
        sync.worker.update(opening)
        sync.worker.update(abort, within=2 * MOMENTS_S)
        assert not sync.worker.receiving(), "the receive goes on after abort_weight_update"
        sync.trainer.go_on()
        sync.pause_after_failure()
        for seed in (2, 3, 4):
            sync.trainer.write(seed, within=LONG_S)
            sync.push()
            assert sync.wrong(seed) is None

    def test_an_abort_when_nothing_is_received_does_nothing(self, harness: Harness) -> None:
        """WT-43"""
        sync = harness.sync()
        sync.worker.abort_engine()
        sync.push()
        sync.worker.abort_engine()
        sync.push()
        assert sync.wrong(1) is None

    def test_a_worker_that_dies_takes_no_trainer_with_it(self, harness: Harness) -> None:
        """WT-45"""
        sync = harness.sync(kind="sizes")
        sync.begin()
        sync.open()
        sync.worker.kill()
        with suppress(WeightTransferError):
            sync.trainer.pause(within=_IN_TIME)
        with suppress(WeightTransferError):
            sync.trainer.publish(9, SHORT_S, within=_IN_TIME)
        with suppress(WeightTransferError):
            sync.trainer.update_info("open", SHORT_S, 0, within=_IN_TIME)
        sync.trainer.write(2, within=LONG_S)
        again = Sync(sync.trainer, harness.workers(), "sizes")
        again.version = 9
        again.connect()
        again.push()
        assert again.wrong(2) is None

    def test_a_second_trainer_replaces_the_first(self, harness: Harness) -> None:
        """WT-46"""
        first = harness.sync()
        first.push()
        second = Sync(harness.trainer(seed=5), first.workers)
        second.connect()
        second.push()
        assert second.wrong(5) is None
        second.connect()
        second.push()
        assert second.wrong(5) is None
        first.trainer.shutdown()
        second.push()

    def test_a_worker_is_shut_down_twice_and_connected_again(self, harness: Harness) -> None:
        """WT-47"""
        trainer, workers = harness.trainer(), harness.workers()
        workers[0].shutdown_engine()
        sync = Sync(trainer, workers)
        sync.connect()
        sync.push()
        infos = _infos(sync, SHORT_S)
        for _ in range(2):
            sync.worker.shutdown_engine()
        with pytest.raises(WeightTransferError):
            sync.worker.receive(*infos, within=_IN_TIME)
        sync.pause_after_failure()
        sync.connect()
        sync.push()
        assert sync.wrong(1) is None

    def test_a_receive_without_a_trainer_is_a_typed_error(self, harness: Harness) -> None:
        """WT-47: of a worker that was never connected."""
        sync = harness.sync()
        infos = _infos(sync, SHORT_S)
        [fresh] = harness.workers()
        with pytest.raises(WeightTransferError):
            fresh.receive(*infos, within=_IN_TIME)
        sync.pause_after_failure()
        again = Sync(sync.trainer, [fresh])
        again.version = sync.version
        again.connect()
        again.push()
        assert again.wrong(1) is None

    def test_a_trainer_is_shut_down_twice(self, harness: Harness) -> None:
        """WT-47: fresh, and with its workers dead."""
        fresh = harness.trainer()
        sync = harness.sync()
        sync.push()
        sync.worker.kill()
        for trainer in (fresh, sync.trainer):
            for _ in range(2):
                trainer.shutdown()

    def test_a_worker_is_shut_down_with_its_trainer_dead(self, harness: Harness) -> None:
        """WT-47"""
        sync = harness.sync()
        sync.push()
        sync.trainer.kill()
        for _ in range(2):
            sync.worker.shutdown_engine()
        _require_sync_works(harness, sync.workers)

    @needs(Capability.MANY_READERS)
    def test_two_workers_receive_a_publish(self, harness: Harness) -> None:
        """WT-48"""
        sync = harness.sync(workers=2, kind="sizes")
        for seed in (1, 2):
            sync.trainer.write(seed, within=LONG_S)
            sync.push()
            assert sync.wrong(seed) is None
            assert sync.trainer.delivered() == 2

    @needs(Capability.MANY_READERS)
    def test_delivered_counts_each_worker(self, harness: Harness) -> None:
        """WT-40, WT-48"""
        sync = harness.sync(workers=2)
        init, update = _infos(sync, LONG_S)
        calls = [sync.worker.begin("receive", LONG_S, init, update)]
        with suppress(BrokenContract):  # it may need the other one, as in a collective
            until(lambda: sync.trainer.delivered() > 0, _WHILE_S, "a worker has reported")
        assert sync.trainer.delivered() <= 1, "one of two workers receives, and two have reported"
        calls.append(sync.workers[1].begin("receive", LONG_S, init, update))
        for call in calls:
            call.result()
        until(lambda: sync.trainer.delivered() == 2, LONG_S, "both workers have reported")

    @needs(Capability.MANY_READERS)
    def test_two_engines_of_one_trainer(self, harness: Harness) -> None:
        """WT-48: one that connects, again too, does not disturb the other."""
        first = harness.sync()
        second = Sync(first.trainer, harness.workers())
        second.connect()
        first.push()
        second.connect()
        first.trainer.write(2)
        first.push()
        assert first.wrong(2) is None
        second.version = first.version
        second.push()
        assert second.wrong(2) is None

    @needs(Capability.MANY_READERS)
    def test_a_worker_that_dies_does_not_hold_up_the_other(self, harness: Harness) -> None:
        """WT-48"""
        sync = harness.sync(workers=2)
        sync.push()
        infos = _infos(sync, SHORT_S)
        sync.workers[1].kill()
        _require_fails_or_complete(sync, infos, may_complete=True)


def _infos(sync: Sync, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a receive needs, with the trainer serving."""
    init = sync.trainer.describe(seconds)
    sync.publish()
    sync.trainer.serve()
    return init, sync.trainer.update_info("open", seconds, sync.trainer.generation())


def _require_fails_or_complete(
    sync: Sync, infos: tuple[dict[str, Any], dict[str, Any]], *, may_complete: bool
) -> None:
    completed = _require_failed_or_right(sync, lambda: sync.worker.receive(*infos, within=_IN_TIME))
    assert may_complete or not completed, "received from a trainer that was killed"


def _require_failed_or_right(sync: Sync, receive: Any) -> bool:
    """Whether everything was received, and right; else a typed error must have been raised."""
    try:
        received = receive()
    except CorruptTransfer:
        raise
    except WeightTransferError:
        return False
    assert received is not None, "receive_weights returned without everything, and without an error"
    assert received == digests(sync.kind, 1)
    return True


def _require_sync_works(harness: Harness, workers: Any) -> None:
    """With a new trainer (WT-44)."""
    sync = Sync(harness.trainer(seed=8), workers)
    sync.connect()
    sync.push()
    assert sync.wrong(8) is None
