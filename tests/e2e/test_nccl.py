"""A trainer broadcasts to the workers of real engines; and what the living do when a peer is not."""

from __future__ import annotations

import pytest
from trainers import in_background, wait_for

from vllm_wt.errors import InvalidInfo, PeerDead, Superseded, Timeout, WeightTransferError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("nccl")]

BUCKETS = {"bucket_nbytes": 64 << 10}
"""Small ones, so that there are several."""
HELD = 2
"""The bucket that a trainer which is to die has not sent."""


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, engines):
    engine = engines.get("nccl", request.param)
    yield engine
    engine.close_trainers()


@pytest.fixture
def pair(engines):
    pair = [engines.get("nccl", tp) for tp in (1, 2)]
    yield pair
    for engine in pair:
        engine.close_trainers()


def connect(trainer, options=BUCKETS, *, idle=False, others=(), deadline_s=60.0, call="connect"):
    trainer.call(call, deadline_s, None, dict(options), idle, "nccl", list(others))


def assert_holds(engine, version, checkpoint):
    """The engine generates what transformers does, and every rank says that it has this version."""
    assert engine.tokens() == engine.reference(checkpoint)
    assert engine.llm.get_weight_version() == str(version)
    states = engine.state()
    assert [(s["state"], s["version"]) for s in states] == [("idle", version)] * engine.tp
    engine.assert_in_step()


def assert_a_new_trainer_syncs(engine, seed, call="connect"):
    trainer = engine.trainer()
    connect(trainer, call=call)
    checkpoint = trainer.call("randomize", seed)
    trainer.call("push", 1)
    assert_holds(engine, 1, checkpoint)


def receiving(engine):
    """All workers receive, and have what comes before the bucket that is held."""
    return all(state["state"] == "receiving" for state in engine.state())


def test_three_rounds_generate_what_transformers_generates(engine):
    trainer = engine.trainer()
    connect(trainer)
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", version)
        trainer.call("push", version)
        assert_holds(engine, version, checkpoint)
        assert engine.tokens() not in seen
        seen.append(engine.tokens())


@pytest.mark.parametrize("verify", ["digest", "bytes"])
@pytest.mark.parametrize("staging", ["device", "none"])
def test_each_way_to_stage_and_to_verify_loads_the_same(engine, staging, verify):
    trainer = engine.trainer()
    options = BUCKETS | {"staging": staging, "verify": verify}
    # What is loaded at once needs an engine that generates nothing meanwhile: this test sees to it.
    connect(trainer, options, idle=staging == "none")
    for version in (1, 2):
        checkpoint = trainer.call("randomize", 10 + version)
        trainer.call("push", version)
        assert_holds(engine, version, checkpoint)


def test_two_engines_at_once(pair):
    """Three workers in one communicator; one engine that leaves makes it another one."""
    first, second = pair
    trainer = first.trainer()
    connect(trainer, others=[str(second.folder / "engine.sock")])
    for version in (1, 2):
        checkpoint = trainer.call("randomize", 20 + version)
        trainer.call("push", version)
        for engine in pair:
            assert_holds(engine, version, checkpoint)
    held = first.tokens()
    assert_a_new_trainer_syncs(second, 23, "reconnect")
    trainer.call("randomize", 24)
    with pytest.raises(Superseded):
        trainer.call("push", 3)
    assert first.tokens() == held
    first.assert_in_step()


# -- a trainer that is killed --------------------------------------------------------------------


def test_a_trainer_killed_after_init(engine):
    first = engine.trainer()
    connect(first)
    old = engine.tokens()
    first.kill()
    engine.assert_in_step()
    assert engine.tokens() == old
    assert_a_new_trainer_syncs(engine, 30)


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_trainer_killed_before_a_call(engine, call):
    first = engine.trainer()
    connect(first)
    old, digests = engine.tokens(), engine.checksums()

    def die():
        first.kill()
        raise ConnectionError("this call never reached the engine")

    engine.before[call] = die
    first.call("randomize", 40)
    with pytest.raises(PeerDead):
        first.call("push", 1)
    engine.assert_in_step()
    assert (engine.tokens(), engine.checksums()) == (old, digests)
    assert_a_new_trainer_syncs(engine, 41)


def test_a_trainer_killed_in_mid_broadcast(engine, tmp_path):
    """The workers say so by themselves, before anybody asks."""
    first = engine.trainer()
    connect(first)
    old, digests = engine.tokens(), engine.checksums()
    first.call("hold", HELD, str(tmp_path / "held"))
    first.call("randomize", 50)
    pushing = in_background(lambda: first.call("push", 1))
    wait_for(lambda: (tmp_path / "held").exists() and receiving(engine))
    first.kill()
    with pytest.raises(PeerDead):
        pushing.result(30)
    wait_for(lambda: all(not state["running"] for state in engine.rpc("wt_receive")))
    errors = [state["error"] for state in engine.rpc("wt_receive")]
    assert errors == ["PeerDead"] * engine.tp
    assert (engine.tokens(), engine.checksums()) == (old, digests)
    assert_a_new_trainer_syncs(engine, 51)


def test_a_trainer_stopped_in_mid_broadcast(engine, tmp_path):
    """Its deadline ends the workers' wait; it goes on, and pushes once more."""
    trainer = engine.trainer()
    connect(trainer)
    trainer.call("randomize", 60)
    trainer.call("push", 1)
    old, digests = engine.tokens(), engine.checksums()
    checkpoint = trainer.call("randomize", 61)
    trainer.call("hold", HELD, str(tmp_path / "held"))
    pushing = in_background(lambda: trainer.call("push", 2, 5.0))
    wait_for(lambda: (tmp_path / "held").exists() and receiving(engine))
    trainer.stop()
    wait_for(lambda: all(not state["running"] for state in engine.rpc("wt_receive")))
    errors = [state["error"] for state in engine.rpc("wt_receive")]
    assert set(errors) <= {"Timeout", "PeerDead"}
    assert (engine.tokens(), engine.checksums()) == (old, digests)
    trainer.go_on()
    (tmp_path / "held").unlink()
    with pytest.raises(WeightTransferError):
        pushing.result(60)
    trainer.call("push", 3)
    assert_holds(engine, 3, checkpoint)


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7"])
def test_B26_an_address_that_cannot_be_is_refused_at_connect(engine, address):
    trainer = engine.trainer()
    with pytest.raises(InvalidInfo, match=address):
        connect(trainer, {"address": address})
    assert_a_new_trainer_syncs(engine, 70)


def test_B26_a_trainer_that_the_workers_do_not_reach_is_named(engine):
    """Of a loopback address that is not the one it listens on."""
    trainer = engine.trainer()
    connect(trainer)
    info = trainer.call("describe", 30.0)
    for wrong in ({"address": "127.0.0.2"}, {"port": 1}):
        with pytest.raises((PeerDead, Timeout)):
            engine.init(info | wrong | {"deadline_s": 5.0})
        engine.assert_in_step()
    with pytest.raises(PeerDead, match="Another trainer"):
        engine.init(info | {"session": "of-before", "deadline_s": 5.0})
    assert_a_new_trainer_syncs(engine, 71)
