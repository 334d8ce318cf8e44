"""An engine whose trainer lives in another process is left to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from vllm_wt.beacon import Beacon, lives
from vllm_wt.errors import Superseded, WrongOrder
from vllm_wt.info import TrainerInfo
from vllm_wt.session import WeightSync

from .support.engines import InProcessEngine, assert_equal, connecting

_OTHER = """
import json, sys
from vllm_wt.beacon import Beacon
beacon = Beacon()
print(json.dumps(beacon.towards("theirs", None).to_wire()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls) as connect:
        yield connect


@pytest.fixture
def other():
    """A trainer in another process, and what it tells of itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    told = json.loads(process.stdout.readline())
    yield process, TrainerInfo.from_wire(told, backend="memory")
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_trainer_answers_for_its_session_alone():
    beacon = Beacon()
    trainer = beacon.towards("mine", None)
    assert trainer == beacon.towards("mine", "localhost")
    assert (trainer.pid, trainer.host) == (os.getpid(), socket.gethostname())
    assert lives(trainer, "mine")
    assert lives(trainer, "mine")
    for session in ("other", "min", "mine2", ""):
        assert not lives(trainer, session)
    beacon.close()
    assert not lives(trainer, "mine")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_is_reached_from_where_the_engine_is(host):
    beacon = Beacon()
    assert lives(beacon.towards("mine", host), "mine")
    beacon.close()


def test_engines_that_are_connected_side_by_side_share_one(monkeypatch):
    beacon = Beacon()
    start = threading.Barrier(8)
    create = socket.create_server

    def create_late(*args, **options):
        made = create(*args, **options)
        others.wait(0.1)  # they come to it meanwhile, if they can
        return made

    others = threading.Event()
    monkeypatch.setattr(socket, "create_server", create_late)

    def towards(_):
        start.wait(30)
        return beacon.towards("mine", None)

    with ThreadPoolExecutor(8) as pool:
        trainers = set(pool.map(towards, range(8)))
    assert len(trainers) == 1
    beacon.close()
    assert not lives(trainers.pop(), "mine")


def test_without_a_port_nobody_is_claimed(monkeypatch):
    def refuse(*args, **options):
        raise OSError("Too many open files")

    beacon = Beacon()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", refuse)
        assert beacon.towards("mine", None).beacon == ""
    assert lives(beacon.towards("mine", None), "mine")


def test_one_that_dribbles_does_not_keep_us_longer_than_one_that_is_silent():
    trainer = Beacon().towards("mine", None)
    said = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dribble():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                while len(said) < 1000:
                    connection.send(b"x")
                    said.append(None)
                    gone.wait(0.5)

        gone = threading.Event()
        thread = threading.Thread(target=dribble)
        thread.start()
        port = server.getsockname()[1]
        assert not lives(replace(trainer, beacon=f"127.0.0.1:{port}"), "mine")
        gone.set()
        thread.join()
    assert len(said) < 32, "it was waited for all of an answer"


def test_a_host_that_is_none_has_no_beacon():
    trainer = Beacon().towards("mine", "no-such-host.invalid")
    assert trainer.beacon == ""
    assert not lives(trainer, "mine")


@pytest.mark.parametrize("beacon", ["", "x", "127.0.0.1", "127.0.0.1:x", ":", "[::1]:99999999"])
def test_what_is_no_address_does_not_live(beacon):
    assert not lives(replace(Beacon().towards("mine", None), beacon=beacon), "mine")


def test_a_beacon_goes_with_its_session():
    beacon = Beacon()
    trainer = beacon.towards("mine", None)
    del beacon
    assert not lives(trainer, "mine")


def test_one_that_is_stopped_or_dead_does_not_live(other):
    process, trainer = other
    assert lives(trainer, "theirs")
    process.send_signal(signal.SIGSTOP)
    assert not lives(trainer, "theirs")
    process.send_signal(signal.SIGCONT)
    assert lives(trainer, "theirs")
    process.kill()
    process.wait()
    assert not lives(trainer, "theirs")


def _belongs_to(engine, trainer):
    engine.round._session, engine.round._trainer = "theirs", trainer


def test_a_second_trainer_is_refused_and_the_first_is_named(connect, transport_cls, loader, other):
    engine = InProcessEngine(transport_cls, loader)
    connect(engine, {"a": torch.ones(3)}).push(1)
    held = dict(loader.weights)
    process, trainer = other
    _belongs_to(engine, trainer)
    with pytest.raises(WrongOrder, match="has a trainer already, which lives") as caught:
        connect(engine, {"a": torch.zeros(3)})
    assert f"process {process.pid} on {socket.gethostname()}, session theirs" in caught.value.got
    assert "reconnect" in caught.value.cure
    assert engine.round._session == "theirs"  # which goes on
    assert_equal(loader.weights, held)


def test_one_that_means_it_takes_the_engine_over(connect, transport_cls, loader, other):
    engine = InProcessEngine(transport_cls, loader)
    connect(engine, {"a": torch.ones(3)})
    _belongs_to(engine, other[1])
    state = {"a": torch.zeros(3)}
    with WeightSync.reconnect(engine, backend="memory", source=state) as sync:
        sync.push(1)
    assert_equal(loader.weights, state)


def test_one_that_has_died_is_followed_by_whoever_comes(connect, transport_cls, loader, other):
    engine = InProcessEngine(transport_cls, loader)
    connect(engine, {"a": torch.ones(3)})
    process, trainer = other
    _belongs_to(engine, trainer)
    process.kill()
    process.wait()
    state = {"a": torch.zeros(3)}
    connect(engine, state).push(1)
    assert_equal(loader.weights, state)


def test_a_process_may_follow_itself(connect, transport_cls, loader):
    engine = InProcessEngine(transport_cls, loader)
    first = connect(engine, {"a": torch.ones(3)})
    first.push(1)
    connect(engine, {"a": torch.zeros(3)}).push(1)
    with pytest.raises(Superseded):
        first.push(2)


def test_a_session_that_is_closed_leaves_its_engines(connect, transport_cls, loader):
    engine = InProcessEngine(transport_cls, loader)
    sync = connect(engine, {"a": torch.ones(3)})
    trainer, session = engine.round._trainer, engine.round._session
    assert lives(trainer, session)
    sync.close()
    assert not lives(trainer, session)
