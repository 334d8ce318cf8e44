"""A push that goes on without the engines that fail."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, TornModel, TransportError
from vllm_wt.pull import PullTrainer
from vllm_wt.pull.names import engine_of, reader_name
from vllm_wt.results import EngineStatus

from .conftest import DictLoader
from .support.engines import PausingEngine, assert_equal, connecting
from .support.pair import Pair, Trainer, fail_to_receive
from .test_pull_ring import Made


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield connect


@pytest.fixture
def pair(connect, transport_cls):
    return Pair(connect, transport_cls)


def assert_left_out(pair, index, result, error_cls, match, version=2):
    """The other one has the new weights, this one the old ones, and both generate."""
    left, other = f"engine{index}", f"engine{1 - index}"
    assert list(result.engines) == [other]
    assert list(result.failed) == [left]
    assert isinstance(result.failed[left], error_cls)
    assert match in str(result.failed[left])
    assert result.failed[left].engine == left
    assert_equal(pair.loaders[1 - index].weights, pair.source)
    assert_equal(pair.loaders[index].weights, pair.old[index])
    assert [engine.paused for engine in pair.engines] == [False, False]
    versions = {left: 1, other: version}
    assert pair.sync.status() == [
        EngineStatus(f"engine{n}", versions[f"engine{n}"], False) for n in (0, 1)
    ]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("step", ["start", "open", "seal", "pause", "finish"])
def test_an_engine_that_fails_is_left_out(pair, step, index):
    pair.engines[index].fails[step] = RuntimeError("boom")
    result = pair.sync.push(2, on_failure="exclude")
    assert_left_out(pair, index, result, Exception, "boom")
    assert [engine.round.state.value for engine in pair.engines] == ["idle", "idle"]
    assert pair.trainer.calls == ["publish", "serve", "send", "settle"]
    pair.assert_good_round(3)  # it is tried again


@pytest.mark.parametrize("index", [0, 1])
def test_an_engine_whose_receive_fails_is_left_out(pair, index, monkeypatch):
    monkeypatch.setattr("vllm_wt.polling._FIRST_S", 0.0)
    fail_to_receive(pair.engines[index].engine)
    result = pair.sync.push(2, on_failure="exclude")
    assert_left_out(pair, index, result, TransportError, "cable")
    pair.assert_good_round(3)


def test_one_that_is_late_is_left_out_and_takes_the_next_version(pair):
    engine, given_up = pair.engines[1].engine, threading.Event()
    receive, abort = engine.receive_weights, engine.abort_weight_update

    def receive_late(info, load_weights):
        given_up.wait(30)
        receive(info, load_weights)

    def give_up(reason):
        abort(reason)
        given_up.set()

    engine.receive_weights, engine.abort_weight_update = receive_late, give_up
    result = pair.sync.push(2, on_failure="exclude", deadline_s=2)
    assert_left_out(pair, 1, result, Timeout, "0 of 1 workers")
    pair.source["a"].add_(1)
    assert pair.sync.push(3, on_failure="exclude").failed == {}
    for loader in pair.loaders:
        assert_equal(loader.weights, pair.source)


def test_one_that_does_not_answer_keeps_nobody_waiting(pair, monkeypatch):
    monkeypatch.setattr("vllm_wt.polling._FIRST_S", 0.0)
    stuck = threading.Event()
    pair.engines[1].calls.meet["poll"] = stuck
    pair.engines[1].engine.receive_weights = lambda info, load_weights: None  # reports nothing
    result = pair.sync.push(2, on_failure="exclude", deadline_s=4)
    assert list(result.engines) == ["engine0"]
    assert isinstance(result.failed["engine1"], Timeout)
    assert_equal(pair.loaders[0].weights, pair.source)
    del pair.engines[1].engine.receive_weights
    asked = len(pair.calls)
    assert list(pair.sync.push(3, on_failure="exclude").failed) == ["engine1"]
    assert not [call for call in pair.calls[asked:] if call.endswith("1")]
    with pytest.raises(Timeout, match="does not answer") as error:
        pair.sync.push(4, deadline_s=0.5)
    assert error.value.engine == "engine1"
    publish = pair.trainer.publish

    def publish_late(version, deadline):
        publish(version, deadline)
        stuck.set()  # the call comes back while the next push waits for it

    pair.trainer.publish = publish_late
    pair.assert_good_round(5)
    assert pair.sync.push(6, on_failure="exclude").failed == {}


@pytest.mark.parametrize("step", ["start", "open", "seal", "pause"])
def test_one_that_hangs_in_a_step_leaves_the_others_time(pair, step):
    stuck = threading.Event()
    pair.engines[1].calls.meet[step] = stuck
    result = pair.sync.push(2, on_failure="exclude", deadline_s=3)
    assert list(result.engines) == ["engine0"]
    assert isinstance(result.failed["engine1"], Timeout)
    assert_equal(pair.loaders[0].weights, pair.source)
    stuck.set()
    pair.assert_good_round(3)


def test_one_that_has_died_is_not_asked_again(pair):
    pair.engines[0].fails["start"] = PeerDead("gone")
    assert "gone" in str(pair.sync.push(2, on_failure="exclude").failed["engine0"])
    asked = len(pair.calls)
    again = pair.sync.push(3, on_failure="exclude")
    assert "gone" in str(again.failed["engine0"])
    assert not [call for call in pair.calls[asked:] if call.endswith("0")]
    pair.assert_good_round(4)  # it may be back
    assert pair.sync.push(5, on_failure="exclude").failed == {}


def test_if_all_fail_the_first_failure_is_raised(pair):
    for engine in pair.engines:
        engine.fails["seal"] = RuntimeError("boom")
    with pytest.raises(Exception, match="boom") as error:
        pair.sync.push(2, on_failure="exclude")
    assert error.value.engine == "engine0"
    pair.assert_old()
    pair.assert_good_round()


def test_what_fails_on_the_trainers_side_is_raised(pair):
    pair.trainer.fails["send"] = PeerDead("the fabric has gone")
    with pytest.raises(PeerDead, match="the fabric has gone"):
        pair.sync.push(2, on_failure="exclude")
    pair.assert_old()
    pair.assert_good_round()


def test_one_that_is_torn_stays_paused_and_the_others_go_on(connect, transport_cls):
    source = {"a": torch.ones(3)}
    loaders = [DictLoader(), DictLoader()]
    engines = [
        PausingEngine(transport_cls, loader, streams=streams)
        for loader, streams in zip(loaders, (True, False), strict=True)
    ]
    sync = connect(engines, source)
    engines[0].fails["seal"] = TornModel("half of it is in")
    result = sync.push(1, on_failure="exclude")
    assert "still paused until a push succeeds: engine0" in str(result.failed["engine0"])
    assert [engine.paused for engine in engines] == [True, False]
    assert_equal(loaders[1].weights, source)
    engines[0].streams = False
    assert sync.push(2, on_failure="exclude").failed == {}
    assert [engine.paused for engine in engines] == [False, False]


@pytest.mark.parametrize("dies_at", [0, 1, 5])
def test_weights_that_are_made_go_on_to_the_others(
    connect, transport_cls, fabric, dies_at, monkeypatch
):
    """A bucket's memory is used again once the others have read it."""
    monkeypatch.setattr("vllm_wt.polling._FIRST_S", 0.0)
    loaders = [DictLoader(), DictLoader()]
    engines = [PausingEngine(transport_cls, loader) for loader in loaders]
    source = Made([(1024,)] * 12)
    sync = connect(engines, source, bucket_nbytes=4096)
    reader = next(each for each in fabric.endpoints if engine_of(each.name) == "engine1")
    submit, submitted = reader.submit, []

    def dying(plan):
        submitted.append(plan)
        if len(submitted) > dies_at:
            raise PeerDead("gone")
        return submit(plan)

    reader.submit = dying
    source.seed = 1
    result = sync.push(1, on_failure="exclude")
    assert list(result.failed) == ["engine1"]
    assert_equal(loaders[0].weights, {f"t{n}": source.value(n) for n in range(12)})


def test_readers_of_one_that_is_left_out_are_not_counted_for_others(connect, transport_cls, fabric):
    engines = [PausingEngine(transport_cls, DictLoader()) for _ in range(2)]
    sync = connect(engines, {"a": torch.ones(3)})
    sync.push(1)
    trainer = sync._trainer
    trainer.publish(2, Deadline(30))
    assert trainer.delivered() == 0
    owner = trainer._transport.name
    first = {reader for reader, _ in fabric.notified[owner] if engine_of(reader) == "engine0"}.pop()
    fabric.notified[owner].add((first, trainer._ticket))
    assert trainer.delivered() == 1
    trainer.leave_out("engine0", 1)
    assert trainer.delivered() == 1  # of 2: engine1 has yet to read
    trainer.publish(3, Deadline(30))
    assert trainer.delivered() == 0
    trainer.settle()


def test_names_of_readers():
    name = reader_name("engine.of.mine", 3)
    assert engine_of(name) == "engine.of.mine"
    assert name != reader_name("engine.of.mine", 3)
    assert len(reader_name("e" * 64, 10**6)) <= 128


@pytest.mark.parametrize("value", ["skip", None, 3])
def test_no_such_value(pair, value):
    with pytest.raises(InvalidInfo, match="on_failure"):
        pair.sync.push(2, on_failure=value)
    assert pair.calls == []


def test_a_trainer_that_cannot_go_on_without_an_engine_says_so(pair, monkeypatch):
    monkeypatch.setattr(PullTrainer, "can_leave_out", property(lambda self: False))
    with pytest.raises(InvalidInfo, match="cannot go on without"):
        pair.sync.push(2, on_failure="exclude")
    assert pair.calls == []
    pair.assert_good_round()
