"""One push to several engines: phase by phase, and what a failure leaves to each of them."""

from __future__ import annotations

import concurrent.futures
import logging
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from vllm_wt import abreast
from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, TornModel, TransportError
from vllm_wt.results import EngineStatus

from .conftest import DictLoader
from .support.engines import PausingEngine, assert_equal, connecting
from .support.pair import Pair, Trainer, fail_to_receive


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield connect


@pytest.fixture
def pair(connect, transport_cls):
    return Pair(connect, transport_cls)


def test_each_phase_is_done_on_every_engine_before_the_next(pair):
    result = pair.sync.push(2)
    for phase in (["start", "open"], ["seal"], ["pause"], ["finish", "confirm", "resume"]):
        calls = [pair.calls.pop(0) for _ in range(2 * len(phase))]
        for number in "01":
            assert [call[:-1] for call in calls if call[-1] == number] == phase
    assert pair.calls == []
    assert pair.trainer.calls == ["publish", "serve", "send", "settle"]
    assert list(result.engines) == ["engine0", "engine1"]


def test_every_engine_receives_at_the_same_time(pair, fabric):
    """The first one's read completes only when the second has begun with its own."""
    fabric.hold = True
    last = pair.engines[1]
    update = last.update_weights

    def then_let_go(info):
        update(info)
        if info["op"] == "open":
            assert pair.trainer.delivered() == 0
            fabric.hold = False

    last.update_weights = then_let_go
    pair.assert_good_round()


@pytest.mark.parametrize("failing", ["engine0", "engine1"])
@pytest.mark.parametrize("step", ["start", "open", "seal", "pause"])
def test_a_failure_before_the_first_commit_leaves_all_as_they_were(pair, step, failing):
    pair.engines[int(failing[-1])].fails[step] = RuntimeError("boom")
    with pytest.raises(Exception, match="boom") as error:
        pair.sync.push(2)
    assert error.value.engine == failing
    assert not [call for call in pair.calls if call.startswith("finish")]
    begun = {call[-1] for call in pair.calls if call.startswith("start")}
    assert {call[-1] for call in pair.calls if call.startswith("abort")} == begun
    assert [engine.round.state.value for engine in pair.engines] == ["idle", "idle"]
    assert pair.trainer.calls[-1] == "settle"
    pair.assert_old()
    pair.assert_good_round()


@pytest.mark.parametrize("failing", ["engine0", "engine1"])
def test_a_receive_that_fails_ends_the_wait_for_all(pair, failing):
    fail_to_receive(pair.engines[int(failing[-1])].engine)
    with pytest.raises(TransportError, match="cable") as error:
        pair.sync.push(2)
    assert error.value.engine == failing
    assert sorted(call for call in pair.calls if call.startswith("abort")) == ["abort0", "abort1"]
    pair.assert_old()
    pair.assert_good_round()


def test_workers_that_do_not_report_in_time(pair, fabric):
    fabric.hold = True
    with pytest.raises(Timeout) as error:
        pair.sync.push(2, deadline_s=0.1)
    assert (error.value.what, error.value.got) == (
        "Not all workers of engine0, engine1 have received the weights",
        "0 of 2 workers",
    )
    fabric.hold = False
    pair.assert_old()
    pair.assert_good_round()


def test_a_commit_that_fails_does_not_keep_the_others_from_theirs(pair):
    pair.loaders[0].fail = ValueError("layer")
    with pytest.raises(TornModel, match="layer") as error:
        pair.sync.push(2)
    assert error.value.engine == "engine0"
    assert_equal(pair.loaders[1].weights, pair.source)
    assert [engine.paused for engine in pair.engines] == [True, False]
    assert pair.sync.status() == [
        EngineStatus("engine0", 1, True, paused=True),
        EngineStatus("engine1", 2, False),
    ]
    pair.loaders[0].fail = None
    pair.assert_good_round(3)


def test_of_two_commits_that_fail_the_first_is_raised(pair, caplog):
    for loader, layer in zip(pair.loaders, ("first", "second"), strict=True):
        loader.fail = ValueError(layer)
    with pytest.raises(TornModel, match="first") as error:
        pair.sync.push(2)
    assert error.value.engine == "engine0"
    assert "engine0, engine1" in error.value.cure
    assert "engine1 failed, too: The commit failed in the middle: ValueError: second" in caplog.text
    for loader in pair.loaders:
        loader.fail = None
    pair.assert_good_round()


def test_an_engine_that_cannot_resume_does_not_keep_the_others_from_their_commit(pair):
    pair.engines[0].fails["resume"] = RuntimeError("boom")
    with pytest.raises(Exception, match="boom"):
        pair.sync.push(2)
    for loader in pair.loaders:
        assert_equal(loader.weights, pair.source)
    assert [engine.paused for engine in pair.engines] == [False, False]  # by a second try


def test_engines_are_connected_at_the_same_time(connect, transport_cls):
    both = threading.Barrier(2, timeout=30)
    engines = [PausingEngine(transport_cls, DictLoader()) for _ in range(2)]
    for engine in engines:
        init = engine.init_weight_transfer_engine
        engine.init_weight_transfer_engine = lambda info, init=init: (both.wait(), init(info))
    sync = connect(engines, {"a": torch.ones(3)})
    assert [each.version for each in sync.status()] == [None, None]


def test_nothing_is_asked_of_any_engine_if_one_has_another_backend(connect, transport_cls):
    engines = [PausingEngine(transport_cls, DictLoader()) for _ in range(2)]
    engines[1].configured_backend = lambda: "other"
    with pytest.raises(InvalidInfo, match="not started for this backend") as caught:
        connect(engines, {"a": torch.ones(3)})
    assert caught.value.engine == "engine1"
    assert [engine.calls for engine in engines] == [[], []]


@pytest.mark.parametrize("call", ["start", "open", "seal", "pause", "finish", "resume"])
def test_each_step_is_taken_with_all_engines_at_the_same_time(pair, call):
    """Neither comes back before the other has been called."""
    both = threading.Barrier(2, timeout=30)
    for engine in pair.engines:
        engine.calls.meet[call] = both
    pair.assert_good_round()


@pytest.fixture
def interruptible():
    """Whatever an engine in this process has made of interrupts."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_an_interrupt_within_the_commits_lets_them_end(interruptible, pair, monkeypatch):
    interrupted = threading.Event()

    def interrupt() -> None:
        for _ in range(6):  # one may be swallowed, by a finalizer that happens to run
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if interrupted.wait(5):
                return
        raise AssertionError("the interrupt has not been seen")

    pair.engines[1].calls.meet["finish"] = SimpleNamespace(wait=interrupt)
    wait = concurrent.futures.wait

    def waiting(futures, timeout=None):
        if timeout == abreast._LET_END_S:
            interrupted.set()
        return wait(futures, timeout)

    monkeypatch.setattr(concurrent.futures, "wait", waiting)
    with pytest.raises(KeyboardInterrupt):
        pair.sync.push(2)
    assert not [call for call in pair.calls if call.startswith("abort")]
    assert pair.sync.status() == [EngineStatus(f"engine{n}", 2, False) for n in range(2)]
    pair.source["a"].add_(1)
    pair.assert_good_round(3)


@pytest.mark.parametrize("sizes", [(1, 1), (1, None), (None, None)])
def test_send_is_called_once_when_all_engines_receive(connect, transport_cls, sizes):
    engines = [PausingEngine(transport_cls, DictLoader()) for _ in sizes]
    for engine, size in zip(engines, sizes, strict=True):
        engine.world_size = lambda size=size: size
    sync = connect(engines, {"a": torch.ones(3)})
    heard = []

    def sending(readers, deadline, watch):
        watch()
        heard.append((readers, [engine.calls[-1] for engine in engines], threading.get_ident()))

    sync._trainer.sending = sending
    sync.push(1)
    readers = 2 if None not in sizes else None
    assert heard == [(readers, ["open", "open"], threading.get_ident())]


def _watching(readers, deadline, watch):
    while True:
        watch()
        deadline.check("the watch does not raise")
        deadline.wait(0.001)


def test_the_watch_of_send_raises_what_an_engine_says_of_its_receive(pair):
    fail_to_receive(pair.engines[1].engine)
    pair.trainer.sending = _watching
    with pytest.raises(TransportError, match="cable") as error:
        pair.sync.push(2, deadline_s=60)
    assert error.value.engine == "engine1"
    assert "poll1" in pair.calls
    assert sorted(pair.calls[-2:]) == ["abort0", "abort1"]
    pair.trainer.sending = lambda *args: None
    pair.assert_old()
    pair.assert_good_round()


def test_the_watch_of_send_raises_what_ended_the_serving(pair):
    pair.trainer.fails["serve"] = PeerDead("the fabric has gone")
    pair.trainer.sending = _watching
    with pytest.raises(PeerDead, match="the fabric has gone"):
        pair.sync.push(2, deadline_s=60)
    pair.trainer.sending = lambda *args: None
    pair.assert_old()
    pair.assert_good_round()


def test_a_send_that_fails_is_typed(pair):
    pair.trainer.fails["send"] = ZeroDivisionError("odd")
    with pytest.raises(TransportError, match="ZeroDivisionError: odd") as error:
        pair.sync.push(2)
    assert error.value.where == "send"
    assert "no engine has taken new weights" in error.value.cure
    assert pair.trainer.calls[-1] == "settle"
    pair.assert_old()
    pair.assert_good_round()


@pytest.mark.parametrize(
    ("trainer_fails", "engine_fails"),
    [(None, None), ("publish", None), ("send", None), (None, "open"), (None, "finish")],
)
def test_settle_is_called_once_at_the_end(pair, trainer_fails, engine_fails):
    if trainer_fails:
        pair.trainer.fails[trainer_fails] = ZeroDivisionError("odd")
    if engine_fails:
        pair.engines[1].fails[engine_fails] = RuntimeError("boom")
    if trainer_fails or engine_fails:
        with pytest.raises(Exception, match=r"odd|boom"):
            pair.sync.push(2)
    else:
        pair.sync.push(2)
    assert pair.trainer.calls.count("settle") == 1
    assert pair.trainer.calls[-1] == "settle"


def test_a_settle_that_fails_after_a_failure_is_logged(pair, caplog):
    pair.trainer.fails["settle"] = ZeroDivisionError("odd")
    pair.engines[0].fails["open"] = RuntimeError("boom")
    with caplog.at_level(logging.ERROR), pytest.raises(Exception, match="boom"):
        pair.sync.push(2)
    assert "could not settle after a failure" in caplog.text
    assert "ZeroDivisionError: odd" in caplog.text


def test_a_settle_that_fails_by_itself_is_raised(pair):
    pair.trainer.fails["settle"] = ZeroDivisionError("odd")
    with pytest.raises(
        TransportError, match="could not end the round: ZeroDivisionError: odd"
    ) as e:
        pair.sync.push(2)
    assert e.value.where == "settle"
    assert "every engine has the new weights" in e.value.cure
    assert [status.version for status in pair.sync.status()] == [2, 2]
    pair.trainer.fails["settle"] = TransportError("typed")
    with pytest.raises(TransportError, match="typed"):
        pair.sync.push(3)
    pair.assert_good_round(4)
