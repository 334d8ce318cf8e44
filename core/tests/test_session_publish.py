"""publish, wait_readers and wait: a push in the background."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_wt.caller import Caller
from vllm_wt.errors import Aborted, InvalidInfo, ManifestMismatch, WeightTransferError, WrongOrder

from .conftest import DictLoader
from .support.engines import PausingEngine, RoundEngine, assert_equal, connecting
from .support.pair import Pair, Trainer
from .test_pull_ring import Made


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield connect


@pytest.fixture
def pair(connect, transport_cls):
    return Pair(connect, transport_cls)


def test_it_returns_before_the_engines_have_anything(pair, fabric):
    fabric.hold = True
    pair.sync.publish(2)
    assert pair.engines[0].round.version == 1
    fabric.hold = False
    result = pair.sync.wait()
    assert (result.version, list(result.engines)) == (2, ["engine0", "engine1"])
    for loader in pair.loaders:
        assert_equal(loader.weights, pair.source)
    assert pair.sync.wait() == result
    pair.assert_good_round(3)


def test_the_weights_may_change_once_nobody_reads_them(pair):
    """The commit is yet to come."""
    may_commit = threading.Event()
    for engine in pair.engines:
        engine.calls.meet["pause"] = may_commit
    pair.sync.publish(2)
    pair.sync.wait_readers()
    published = {name: tensor.clone() for name, tensor in pair.source.items()}
    assert [engine.round.version for engine in pair.engines] == [1, 1]
    pair.source["a"].add_(1)
    may_commit.set()
    pair.sync.wait()
    for loader in pair.loaders:
        assert_equal(loader.weights, published)


def test_not_before(pair, fabric):
    fabric.hold = True
    pair.sync.publish(2)
    waiting = Caller("waiting")(pair.sync.wait_readers)
    while pair.calls.count("open0") + pair.calls.count("open1") < 2:
        pass
    assert not waiting.done()
    pair.source["a"].add_(1)
    fabric.hold = False
    with pytest.raises(ManifestMismatch, match="written to while the workers were reading"):
        waiting.result()
    pair.assert_old()


@pytest.mark.parametrize("place", ["device", "host"])
def test_with_a_snapshot_they_may_change_at_once(connect, transport_cls, fabric, place):
    source = {"a": torch.arange(12.0)}
    loader = DictLoader()
    sync = connect(PausingEngine(transport_cls, loader), source, snapshot=place)
    fabric.hold = True
    sync.publish(1)
    published = {"a": source["a"].clone()}
    source["a"].add_(1)
    fabric.hold = False
    sync.wait()
    assert_equal(loader.weights, published)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_what_has_to_be_made_is_made_into_the_snapshot(connect, transport_cls):
    loader = DictLoader()
    engine = PausingEngine(transport_cls, loader)
    source = Made([(5,), (2, 2)])
    with pytest.raises(InvalidInfo, match="cannot be pushed in the background") as caught:
        connect(engine, source).publish(1)
    assert "snapshot" in caught.value.cure
    sync = connect(engine, source, snapshot="host")
    sync.publish(1)
    assert source.walks == 1
    source.seed = 1
    sync.wait()
    source.seed = 0
    assert_equal(loader.weights, {f"t{n}": source.value(n) for n in range(2)})
    assert source.walks == 1


def test_a_failure_is_raised_by_whoever_waits(pair):
    pair.engines[1].fails["seal"] = RuntimeError("boom")
    pair.sync.publish(2)
    for wait in (pair.sync.wait_readers, pair.sync.wait, pair.sync.wait):
        with pytest.raises(WeightTransferError, match="boom") as caught:
            wait()
        assert caught.value.engine == "engine1"
    pair.assert_old()
    pair.assert_good_round()


def test_an_engine_may_be_left_out(pair):
    pair.engines[1].fails["seal"] = RuntimeError("boom")
    pair.sync.publish(2, on_failure="exclude")
    assert list(pair.sync.wait().failed) == ["engine1"]


@pytest.mark.parametrize("call", ["publish", "push", "status", "add", "remove"])
def test_one_at_a_time(pair, fabric, call):
    fabric.hold = True
    pair.sync.publish(2)
    arguments = {"add": [pair.engines[0]], "remove": ["engine0"], "status": []}.get(call, [3])
    with pytest.raises(WrongOrder, match=f"{call} while a version that was published") as caught:
        getattr(pair.sync, call)(*arguments)
    assert "version 2" in caught.value.got
    fabric.hold = False
    assert pair.sync.wait().version == 2
    pair.assert_good_round(3)


def test_close_gives_it_up(pair, fabric):
    fabric.hold = True
    pair.sync.publish(2)
    pair.sync.close()
    with pytest.raises(Aborted, match="the session was closed"):
        pair.sync.wait()
    for loader, old in zip(pair.loaders, pair.old, strict=True):
        assert_equal(loader.weights, old)
    assert [engine.paused for engine in pair.engines] == [False, False]
    with pytest.raises(WrongOrder, match="after close"):
        pair.sync.publish(3)


@pytest.mark.parametrize("call", ["wait", "wait_readers"])
def test_nothing_was_published(pair, call):
    with pytest.raises(WrongOrder, match="without a version that was published"):
        getattr(pair.sync, call)()


def test_an_engine_of_this_process_is_used_by_one_thread(connect, transport_cls):
    engine = RoundEngine(transport_cls, DictLoader())
    sync = connect(engine, {"a": torch.ones(3)})
    with pytest.raises(InvalidInfo, match="used by one thread only"):
        sync.publish(1)
    sync.push(1)


@pytest.mark.parametrize(
    ("version", "options"), [(1, {}), (-1, {}), (2, {"deadline_s": 0}), (2, {"on_failure": "x"})]
)
def test_arguments_are_checked_at_once(pair, version, options):
    with pytest.raises(InvalidInfo):
        pair.sync.publish(version, **options)
    assert pair.calls == []
    pair.assert_good_round()
