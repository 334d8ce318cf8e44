"""A round that fails anywhere leaves the engine with its old weights, in step and ready."""

from __future__ import annotations

import itertools

import pytest
from trainers import in_background, wait_for

from vllm_wt.errors import (
    CorruptTransfer,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    TransportError,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PHASES = {"open": TransportError, "receive": TransportError, "seal": CorruptTransfer}


def test_each_phase_failing_on_each_rank_then_a_good_round(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    versions = itertools.count(1)
    trainer.call("randomize", 100)
    trainer.call("push", next(versions))
    old, digests = engine.tokens(), engine.checksums()
    checkpoint = trainer.call("randomize", 101)
    rounds = 0
    while rounds < 10:
        for phase, error_cls in PHASES.items():
            for rank in range(engine.tp):
                engine.fail_once(phase, rank)
                with pytest.raises(error_cls) as failure:
                    trainer.call("push", next(versions))
                assert failure.value.backend == "rdma"
                if engine.tp > 1:
                    assert list(failure.value.ranks) == [rank]
                engine.assert_in_step()
                assert engine.checksums() == digests
                rounds += 1
    assert engine.tokens() == old
    assert not trainer.call("torn")
    trainer.call("push", next(versions))
    assert engine.tokens() == engine.reference(checkpoint) != old
    engine.assert_in_step()


def test_a_failing_commit_is_torn_until_a_full_round_lands(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    versions = itertools.count(1)
    for rank in range(engine.tp):
        checkpoint = trainer.call("randomize", 200 + rank)
        engine.fail_once("apply", rank)
        with pytest.raises(TornModel, match="injected into the commit"):
            trainer.call("push", next(versions))
        engine.assert_in_step()
        states = engine.state()
        assert [state["torn"] for state in states] == [True] * engine.tp
        assert [state["meta"] for state in states] == [[]] * engine.tp
        assert trainer.call("torn")
        trainer.call("push", next(versions))
        assert not trainer.call("torn")
        assert [state["torn"] for state in engine.state()] == [False] * engine.tp
        assert engine.tokens() == engine.reference(checkpoint)
        engine.assert_in_step()


def test_trainer_killed_after_init(engine):
    first = engine.trainer()
    first.call("connect")
    old = engine.tokens()
    first.kill()
    engine.assert_in_step()
    assert engine.tokens() == old
    _new_trainer_syncs(engine, seed=300)


def test_trainer_killed_after_start(engine):
    first = engine.trainer()
    first.call("connect")
    old = engine.tokens()
    engine.client.start_weight_update()  # the last thing that the trainer asked for
    first.kill()
    assert engine.tokens() == old
    _new_trainer_syncs(engine, seed=310)


def test_trainer_killed_during_the_read(engine):
    first = engine.trainer()
    first.call("connect")
    old, digests = engine.tokens(), engine.checksums()
    engine.rpc("wt_hold_read")
    first.call("randomize", 320)
    pushing = in_background(lambda: first.call("push", 1))
    wait_for(lambda: all(s["state"] == "receiving" for s in engine.state()))
    first.kill()
    with pytest.raises(PeerDead):
        pushing.result(30)
    engine.rpc("wt_let_go")
    engine.assert_in_step()
    assert engine.tokens() == old
    assert engine.checksums() == digests
    _new_trainer_syncs(engine, seed=321)


def test_trainer_killed_before_finish(engine):
    first = engine.trainer()
    first.call("connect")
    old, digests = engine.tokens(), engine.checksums()

    def die():
        first.kill()
        raise ConnectionError("this call never reached the engine")

    engine.before["finish_weight_update"] = die
    first.call("randomize", 330)
    with pytest.raises(PeerDead):
        first.call("push", 1)
    assert [state["state"] for state in engine.state()] == ["sealed"] * engine.tp
    engine.assert_in_step()
    assert engine.tokens() == old
    assert engine.checksums() == digests
    _new_trainer_syncs(engine, seed=331)


@pytest.mark.parametrize("left", ["failed update", "failed commit"])
def test_trainer_killed_after_a_failure(engine, left):
    first = engine.trainer()
    first.call("connect")
    first.call("randomize", 340)
    if left == "failed update":
        engine.fail_once("seal", 0)
    else:
        engine.fail_once("apply", 0)
    with pytest.raises((CorruptTransfer, TornModel)):
        first.call("push", 1)
    first.kill()
    assert [state["torn"] for state in engine.state()] == [left == "failed commit"] * engine.tp
    engine.assert_in_step()
    second = engine.trainer()
    second.call("connect")
    assert second.call("torn") == (left == "failed commit")
    checkpoint = second.call("randomize", 341)
    second.call("push", 1)
    assert not second.call("torn")
    assert engine.tokens() == engine.reference(checkpoint)
    engine.assert_in_step()


def test_a_stopped_trainer_that_goes_on_after_it_was_replaced(engine):
    """At TP 2 vLLM's own refusal of its next call would have put the replies out of step for good."""
    first, second = engine.trainer(), engine.trainer()
    first.call("connect")
    engine.rpc("wt_hold_read")
    first.call("randomize", 370)
    pushing = in_background(lambda: first.call("push", 1))
    wait_for(lambda: all(s["state"] == "receiving" for s in engine.state()))
    first.stop()
    checkpoint = second.call("randomize", 371)
    second.call("connect")
    second.call("push", 1)
    first.go_on()
    with pytest.raises(Superseded, match="Another trainer has connected"):
        pushing.result(60)
    engine.assert_in_step()
    with pytest.raises(Superseded):
        first.call("push", 2)
    engine.assert_in_step()
    assert engine.tokens() == engine.reference(checkpoint)
    checkpoint = second.call("randomize", 372)
    second.call("push", 2)  # what the first one has asked for in between does not matter
    assert engine.tokens() == engine.reference(checkpoint)
    engine.assert_in_step()


def test_trainer_that_stops_polling_times_out_at_connect(engine):
    """A stopped process answers no one: the deadline is the worker's own."""
    first = engine.trainer()
    first.call("connect")
    old = engine.tokens()
    info = first.call("describe", 2.0)
    first.stop()
    with pytest.raises(Timeout, match="has not answered"):
        engine.init(info)
    engine.assert_in_step()
    assert engine.tokens() == old
    first.kill()
    _new_trainer_syncs(engine, seed=350)


def test_ten_good_rounds_after_all_that_leave_nothing_behind(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    trainer.call("randomize", 360)
    trainer.call("push", 1)
    before = engine.rpc("wt_memory")
    generation = trainer.call("registrations")
    for version in range(2, 12):
        trainer.call("push", version)
    after = engine.rpc("wt_memory")
    for key in ("arena", "transport", "threads"):
        assert [worker[key] for worker in after] == [worker[key] for worker in before], key
    assert trainer.call("registrations") == generation


def _new_trainer_syncs(engine, seed):
    trainer = engine.trainer()
    checkpoint = trainer.call("randomize", seed)
    trainer.call("connect")
    trainer.call("push", 1)
    assert engine.tokens() == engine.reference(checkpoint)
    assert [state["torn"] for state in engine.state()] == [False] * engine.tp
    engine.assert_in_step()
