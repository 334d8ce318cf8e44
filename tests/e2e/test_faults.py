"""A round that fails anywhere leaves the engine with its old weights, in step, ready for the next."""

from __future__ import annotations

import itertools

import pytest

from vllm_wt.errors import (
    CorruptTransfer,
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
        with pytest.raises(TornModel, match="injected into load_weights"):
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


def _new_trainer_syncs(engine, seed):
    trainer = engine.trainer()
    checkpoint = trainer.call("randomize", seed)
    trainer.call("connect")
    trainer.call("push", 1)
    assert engine.tokens() == engine.reference(checkpoint)
    engine.assert_in_step()
