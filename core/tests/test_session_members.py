"""Engines that come, go and come back while a session lasts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_wt.errors import InvalidInfo, PeerDead, WrongOrder
from vllm_wt.results import EngineStatus

from .conftest import DictLoader
from .support.engines import PausingEngine, assert_equal, connecting
from .support.pair import Pair, Trainer


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield connect


@pytest.fixture
def pair(connect, transport_cls):
    return Pair(connect, transport_cls)


@pytest.fixture
def late(transport_cls):
    loader = DictLoader()
    engine = PausingEngine(transport_cls, loader)
    engine.loader = loader
    return engine


def test_one_that_comes_takes_part_from_the_next_push_on(pair, late):
    handles = [link._known for link in pair.sync._members.links]
    assert pair.sync.add(late) == ["engine2"]
    assert pair.calls == []  # the others hear nothing of it
    assert pair.sync.status()[2] == EngineStatus("engine2", None, False)
    result = pair.sync.push(2)
    assert list(result.engines) == ["engine0", "engine1", "engine2"]
    assert_equal(late.loader.weights, pair.source)
    pair.assert_good_round(3)
    assert [
        link._known for link in pair.sync._members.links[:2]
    ] == handles  # nor were they connected anew


@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_with_a_snapshot_it_gets_the_current_version_at_once(
    connect, transport_cls, late, snapshot
):
    source = {"a": torch.arange(12.0), "b": torch.ones(3)}
    loader = DictLoader()
    first = PausingEngine(transport_cls, loader)
    sync = connect(first, source, snapshot=snapshot)
    sync.push(7)
    pushed = {name: tensor.clone() for name, tensor in source.items()}
    source["a"].add_(1)  # the trainer has gone on
    asked = len(first.calls)
    sync.add(late)
    assert first.calls[asked:] == []
    assert_equal(late.loader.weights, pushed)
    assert [status.version for status in sync.status()] == [7, 7]
    sync.push(8)
    for weights in (loader.weights, late.loader.weights):
        assert_equal(weights, source)


def test_before_the_first_push_there_is_nothing_to_bring(connect, transport_cls, late):
    source = {"a": torch.ones(3)}
    sync = connect(PausingEngine(transport_cls, DictLoader()), source, snapshot="host")
    sync.add(late)
    assert late.calls == ["init", "confirm"]
    sync.push(1)
    assert_equal(late.loader.weights, source)


def test_a_snapshot_that_failed_is_not_brought_to_anybody(connect, transport_cls, late):
    source = {"a": torch.ones(3), "b": torch.ones(3)}
    sync = connect(PausingEngine(transport_cls, DictLoader()), source, snapshot="host")
    sync.push(1)
    memory = source["b"].untyped_storage()
    memory.resize_(0)
    with pytest.raises(Exception, match="freed or resized"):
        sync.push(2)
    memory.resize_(12)
    source["b"].fill_(5)
    sync.add(late)
    assert late.calls == ["init", "confirm"]
    sync.push(2)
    assert_equal(late.loader.weights, source)


def test_one_that_leaves_keeps_its_weights(pair):
    pair.sync.remove("engine0")
    pair.source["a"].add_(1)
    assert list(pair.sync.push(2).engines) == ["engine1"]
    assert_equal(pair.loaders[0].weights, pair.old[0])
    assert_equal(pair.loaders[1].weights, pair.source)
    assert not [call for call in pair.calls if call.endswith("0")]
    assert [status.name for status in pair.sync.status()] == ["engine1"]
    assert pair.sync.add(pair.engines[0]) == ["engine2"]  # no name is used for another engine
    pair.sync.push(3)
    assert_equal(pair.loaders[0].weights, pair.source)


def test_one_that_was_started_again_takes_its_own_place(pair):
    pair.engines[0].fails["start"] = PeerDead("gone")
    assert list(pair.sync.push(2, on_failure="exclude").failed) == ["engine0"]
    assert list(pair.sync.push(3, on_failure="exclude").failed) == ["engine0"]
    assert pair.sync.add(pair.engines[0]) == ["engine0"]
    assert [status.name for status in pair.sync.status()] == ["engine1", "engine0"]
    assert pair.sync.push(4, on_failure="exclude").failed == {}
    assert_equal(pair.loaders[0].weights, pair.source)


def test_engines_of_one_address_are_one(connect, transport_cls):
    loaders = [DictLoader(), DictLoader()]
    engines = [PausingEngine(transport_cls, loader) for loader in loaders]
    for engine in engines:
        engine.address = "http://engine:8000"
    sync = connect(engines[0], {"a": torch.ones(3)})
    assert sync.add(engines[1]) == ["engine0"]
    assert list(sync.push(1).engines) == ["engine0"]
    assert loaders[0].weights == {}
    assert "a" in loaders[1].weights


@pytest.mark.parametrize("step", ["init", "open", "finish"])
def test_one_that_fails_to_come_leaves_the_session_as_it_was(connect, transport_cls, late, step):
    source = {"a": torch.ones(3)}
    loader = DictLoader()
    sync = connect(PausingEngine(transport_cls, loader), source, snapshot="device")
    sync.push(1)
    late.fails[step] = RuntimeError("boom")
    with pytest.raises(Exception, match="boom"):
        sync.add(late)
    assert [status.name for status in sync.status()] == ["engine0"]
    assert not late.paused
    source["a"].add_(1)
    sync.push(2)
    assert_equal(loader.weights, source)
    assert sync.add(late) == ["engine2"]
    assert_equal(late.loader.weights, source)


def test_a_session_without_engines(pair, late):
    for name in ("engine0", "engine1"):
        pair.sync.remove(name)
    with pytest.raises(InvalidInfo, match="has no engines"):
        pair.sync.push(2)
    pair.sync.add(late)
    pair.sync.push(2)
    assert_equal(late.loader.weights, pair.source)


@pytest.mark.parametrize("name", ["engine7", None, 0])
def test_no_such_engine(pair, name):
    with pytest.raises(InvalidInfo, match="no such engine") as caught:
        pair.sync.remove(name)
    assert caught.value.expected == "engine0 or engine1"
    pair.assert_good_round()


def test_not_after_close_nor_within_a_round(pair, late):
    def come() -> None:
        with pytest.raises(WrongOrder, match="another call of this session"):
            pair.sync.add(late)

    pair.engines[0].calls.meet["seal"] = SimpleNamespace(wait=come)
    pair.assert_good_round()
    pair.sync.close()
    for call in (lambda: pair.sync.add(late), lambda: pair.sync.remove("engine0")):
        with pytest.raises(WrongOrder, match="after close"):
            call()


@pytest.mark.parametrize("value", ["disk", None, True])
def test_no_such_snapshot(connect, transport_cls, late, value):
    with pytest.raises(InvalidInfo, match="snapshot"):
        connect(late, {"a": torch.ones(3)}, snapshot=value)
    assert late.calls == []


def test_a_snapshot_of_weights_that_are_handed_over(connect, late):
    from vllm_wt.source import Announced

    announced = Announced({"a": torch.ones(3)})
    with pytest.raises(InvalidInfo, match="not there to be copied"):
        connect(late, announced, snapshot="host")
