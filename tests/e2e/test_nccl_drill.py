"""A trainer is killed in each phase of a round with a real engine, ten times, and a worker once.

``make test-all ARGS=tests/e2e/test_nccl_drill.py``; VLLM_WT_DRILL_KILLS sets another number.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from contextlib import contextmanager, suppress

import pytest
from trainers import in_background, wait_for

from vllm_wt.errors import EngineError, PeerDead, Timeout, TransportError, WeightTransferError
from vllm_wt.testing.models import ModelShape

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("nccl"),
]

KILLS = int(os.environ.get("VLLM_WT_DRILL_KILLS", "10"))
BUCKETS = {"bucket_nbytes": 64 << 10}
DEADLINE_S = 5.0
SOON_S = 2.0
"""Beyond the deadline."""
PHASES = {
    "connect": ("init_weight_transfer_engine", 0),
    "start": ("start_weight_update", 0),
    "open": ("update_weights", 0),
    "wire": None,
    "seal": ("update_weights", 1),
    "commit": ("finish_weight_update", 0),
}
"""The call that the engine gets when the peer dies, and how many of the same come before it."""
LATEST_S = 0.05
"""After the call has begun: some kills come before what it does, some within, and some after."""
SEEDS = itertools.cycle(range(810, 814))


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, engines):
    engine = engines.get("nccl", request.param)
    yield engine
    engine.close_trainers()


def connect(trainer, deadline_s=60.0, others=()):
    trainer.call("connect", deadline_s, None, dict(BUCKETS), False, "nccl", list(others))


def at_call(engine, phase, act):
    """Have something done as soon as the engine gets a call."""
    method, before = PHASES[phase]

    def got():
        nonlocal before
        before -= 1
        if before < 0:
            act()
        else:
            engine.before[method] = got

    engine.before[method] = got


def assert_still(engine, seconds):
    """All workers have ended what they did, by themselves."""
    ended = in_background(
        lambda: wait_for(lambda: not any(each["running"] for each in engine.rpc("wt_receive")))
    )
    ended.result(seconds)
    engine.assert_in_step()


def assert_syncs(engine):
    trainer = engine.trainer()
    connect(trainer)
    checkpoint = trainer.call("randomize", next(SEEDS))
    trainer.call("push", 1)
    assert engine.tokens() == engine.reference(checkpoint)
    trainer.kill()


def kill_trainer(engine, phase, moment, bucket, flag):
    """One that was killed in this phase of its first push; the checkpoint that it pushed."""
    dying = engine.trainer()
    died = threading.Event()

    def kill():
        dying.kill()
        died.set()

    checkpoint = dying.call("randomize", next(SEEDS))
    if phase != "connect":
        connect(dying)
    if phase == "wire":
        dying.call("hold", bucket, str(flag))
        pushing = in_background(lambda: dying.call("push", 1, DEADLINE_S))
        wait_for(flag.exists)
        kill()
        flag.unlink()
    else:
        timer = threading.Timer(moment, kill)
        at_call(engine, phase, timer.start)
        if phase == "connect":
            pushing = in_background(lambda: connect(dying, DEADLINE_S))
        else:
            pushing = in_background(lambda: dying.call("push", 1, DEADLINE_S))
        assert died.wait(60)
    with suppress(PeerDead):  # or it had come to its end before
        pushing.result(30)
    return checkpoint


@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_is_killed_ten_times(engine, phase, tmp_path):
    moments = random.Random(phase)
    for number in range(KILLS):
        old = engine.tokens()
        flag = tmp_path / f"held{number}"
        drawn = moments.uniform(0, LATEST_S), moments.randrange(1, 5)
        checkpoint = kill_trainer(engine, phase, *drawn, flag)
        assert_still(engine, DEADLINE_S + SOON_S)
        versions = [state["version"] for state in engine.state()]
        assert versions == [versions[0]] * engine.tp
        assert not any(state["torn"] for state in engine.state())
        # One that could not connect has left the version of the trainer before, too.
        is_new = phase != "connect" and versions[0] == 1
        assert engine.tokens() == (engine.reference(checkpoint) if is_new else old)
        assert_syncs(engine)


@pytest.mark.parametrize("phase", ["connect", "wire", "commit"])
def test_a_worker_is_killed(make_engine, engines, phase, tmp_path):
    """Its vLLM ends with it; the trainer says so in time, and goes on with another engine."""
    other = engines.get("nccl", 1)
    with contextmanager(make_engine)(ModelShape(vocab=500, tied=True), 2, "nccl") as dying:
        trainer = dying.trainer()
        others = [str(other.folder / "engine.sock")]
        pid = int(dying.rpc("wt_resources")[-1]["pid"])

        def kill():
            os.kill(pid, signal.SIGKILL)

        trainer.call("randomize", 820)
        if phase != "connect":
            connect(trainer, others=others)
        if phase == "wire":
            flag = tmp_path / "held"
            trainer.call("hold", 2, str(flag))
            calling = in_background(lambda: trainer.call("push", 1, DEADLINE_S))
            wait_for(flag.exists)
            kill()
            flag.unlink()
        else:
            at_call(dying, phase, kill)
            call = (
                (lambda: connect(trainer, DEADLINE_S, others))
                if phase == "connect"
                else (lambda: trainer.call("push", 1, DEADLINE_S))
            )
            calling = in_background(call)
        error = calling.exception(60)
        assert isinstance(error, (PeerDead, EngineError, TransportError, Timeout)), error
        assert isinstance(error, WeightTransferError)
        assert error.cure
        assert_still(other, DEADLINE_S + SOON_S)
        assert_syncs(other)
        other.close_trainers()
