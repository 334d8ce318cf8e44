"""What a push pauses, when, and what it leaves paused."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    EngineError,
    InvalidInfo,
    NotPaused,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    UnsupportedVllm,
    WeightTransferError,
)
from vllm_wt.results import EngineStatus

from .support.engines import InProcessEngine, PausingEngine, assert_equal, connecting

PAUSED = EngineStatus("engine0", 1, True, paused=True)


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls) as connect:
        yield connect


@pytest.fixture
def engine(transport_cls, loader):
    return PausingEngine(transport_cls, loader)


@pytest.fixture
def source():
    return {"a": torch.arange(12.0), "b": torch.ones(3)}


@pytest.fixture
def sync(connect, engine, source):
    """A session that has pushed version 1."""
    sync = connect(engine, source)
    sync.push(1)
    engine.calls.clear()
    source["a"].add_(1)
    return sync


@pytest.fixture
def streaming(connect, transport_cls, loader, source):
    """An engine that loads while it receives, and a session that has pushed version 1 to it."""
    engine = PausingEngine(transport_cls, loader, streams=True)
    sync = connect(engine, source)
    sync.push(1)
    engine.calls.clear()
    source["a"].add_(1)
    return engine, sync


def test_an_engine_is_paused_for_the_commit_only(sync, engine, loader, source):
    stages = sync.push(2).engines["engine0"]
    assert engine.calls == ["start", "open", "seal", "pause", "finish", "confirm", "resume"]
    assert stages.stop > 0
    assert stages.resume > 0
    assert not engine.paused
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


def test_without_overlap_it_is_paused_for_all_of_the_push(sync, engine, loader, source):
    stages = sync.push(2, overlap=False).engines["engine0"]
    one = ["start", "open", "seal", "finish", "confirm"]
    assert engine.calls == ["confirm", "pause", *one, "resume"]
    assert stages.stop > 0
    assert stages.resume > 0
    assert not engine.paused
    assert_equal(loader.weights, source)


class AskingEngine(PausingEngine):
    """Notes how it is paused."""

    def __init__(self, transport_cls, loader, **options) -> None:
        super().__init__(transport_cls, loader, **options)
        self.asked: list[tuple[str, bool]] = []

    def pause(self, mode="keep", clear_cache=True):
        self.asked.append((mode, clear_cache))
        super().pause()


@pytest.fixture
def asking(connect, transport_cls, loader, source):
    """One, and a session that has pushed version 1 to it."""
    engine = AskingEngine(transport_cls, loader)
    sync = connect(engine, source)
    sync.push(1)
    engine.calls.clear()
    engine.asked.clear()
    source["a"].add_(1)
    return engine, sync


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("how", "asked"),
    [
        ({}, ("keep", True)),
        ({"pause": "keep", "kv": "keep"}, ("keep", False)),
        ({"pause": "wait"}, ("wait", True)),
        ({"pause": "abort", "kv": "keep"}, ("abort", False)),
    ],
)
def test_how_an_engine_is_paused(asking, loader, source, how, asked, overlap):
    engine, sync = asking
    sync.push(2, overlap=overlap, **how)
    assert engine.asked == [asked]
    assert not engine.paused
    assert_equal(loader.weights, source)
    sync.push(3)
    assert engine.asked == [asked, ("keep", True)], "it is said for one push"


def test_an_engine_need_not_be_paused(asking, loader, source):
    engine, sync = asking
    stages = sync.push(2, pause=None).engines["engine0"]
    assert engine.calls == ["start", "open", "seal", "finish", "confirm"]
    assert (stages.stop, stages.resume) == (0, 0)
    assert_equal(loader.weights, source)


class ForgettingEngine(AskingEngine):
    """Notes when it is to forget what it has computed."""

    def reset_caches(self, at_once=True):
        self.calls.append("reset" if at_once else "reset later")


@pytest.mark.parametrize(
    ("how", "resets"),
    [
        ({}, False),
        ({"kv": "keep"}, False),
        ({"pause": None}, True),
        ({"pause": None, "kv": "keep"}, False),
    ],
)
def test_an_engine_that_is_not_paused_forgets_after_the_commit(
    connect, transport_cls, loader, source, how, resets
):
    engine = ForgettingEngine(transport_cls, loader)
    sync = connect(engine, source)
    assert "reset" not in engine.calls
    sync.push(1, **how)
    assert ("reset" in engine.calls) == resets
    if resets:
        assert engine.calls[-3:] == ["finish", "confirm", "reset"]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_an_idle_engine_forgets_before_the_round(connect, transport_cls, loader, source, kv):
    class Idle(ForgettingEngine):
        idle_between_calls = True
        pause = resume = is_paused = None

    engine = Idle(transport_cls, loader)
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1, kv=kv)
    expected = ["start", "open", "seal", "finish", "confirm"]
    assert engine.calls == ["reset later"] * (kv == "recompute") + expected


def test_caches_that_cannot_be_reset_are_an_error_of_the_push(asking, loader, source):
    engine, sync = asking

    def reset_caches():
        raise EngineError("They are in use", where="reset_caches")

    engine.reset_caches = reset_caches
    with pytest.raises(EngineError) as error:
        sync.push(2, pause=None)
    assert (error.value.where, error.value.engine) == ("reset_caches", "engine0")
    assert sync.status() == [EngineStatus("engine0", 2, False)], "it has the new weights"
    assert_equal(loader.weights, source)
    sync.push(3)


def test_one_that_is_torn_without_a_pause_is_paused_then(asking, loader, source):
    engine, sync = asking
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        sync.push(2, pause=None)
    assert (engine.paused, engine.asked) == (True, [("keep", True)])
    loader.fail = None
    sync.push(2, pause=None)
    assert not engine.paused
    assert_equal(loader.weights, source)


def test_an_engine_that_streams_must_be_paused(streaming, loader):
    engine, sync = streaming
    with pytest.raises(NotPaused) as error:
        sync.push(2, pause=None)
    assert 'pause="keep"' in error.value.cure
    assert not engine.paused
    sync.push(2)


@pytest.mark.parametrize(
    "how", [{"pause": "never"}, {"kv": None}, {"pause": True}, {"pause": None, "overlap": False}]
)
def test_how_no_engine_is_paused(sync, engine, how):
    for call in (sync.push, sync.publish):
        with pytest.raises(InvalidInfo) as error:
            call(2, **how)
        assert error.value.where in {"pause", "kv", "overlap"}
    assert engine.calls == []
    sync.push(2)


def test_a_client_that_pauses_in_one_way(sync, engine, loader, source):
    with pytest.raises(InvalidInfo) as error:
        sync.push(2, kv="keep")
    assert (error.value.where, error.value.engine) == ("pause", "engine0")
    assert error.value.got == "pause()"
    assert "pause" not in engine.calls
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_without_pause_is_not_paused(connect, transport_cls, loader, source, overlap):
    engine = InProcessEngine(transport_cls, loader)
    sync = connect(engine, source)
    engine.calls.clear()
    stages = sync.push(1, overlap=overlap).engines["engine0"]
    assert engine.calls == ["start", "open", "seal", "finish", "confirm"]
    assert (stages.stop, stages.resume) == (0.0, 0.0)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_that_turns_out_to_have_no_pause_is_asked_once(sync, engine, overlap):
    engine.fails["pause"] = UnsupportedVllm("no such route")
    sync.push(2, overlap=overlap)
    assert engine.calls.count("pause") == 1
    assert "resume" not in engine.calls
    engine.calls.clear()
    sync.push(3, overlap=overlap)
    assert engine.calls == ["start", "open", "seal", "finish", "confirm"]


@pytest.mark.parametrize("missing", ["pause", "resume"])
def test_half_of_the_two_methods_is_none(connect, engine, loader, source, missing):
    setattr(engine, missing, None)
    connect(engine, source).push(1)
    assert not {"pause", "resume"} & set(engine.calls)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), Timeout("boom"), KeyboardInterrupt("boom")]
)
def test_a_pause_that_fails_is_followed_by_a_resume(sync, engine, loader, overlap, error):
    old = dict(loader.weights)
    engine.fails["pause"] = error
    with pytest.raises((EngineError, Timeout, KeyboardInterrupt), match="boom"):
        sync.push(2, overlap=overlap)
    assert engine.calls[-1] == "resume"
    assert not engine.paused
    assert_equal(loader.weights, old)
    assert sync.status() == [EngineStatus("engine0", 1, False)]
    sync.push(2)


@pytest.mark.parametrize("step", ["start", "open", "seal"])
def test_an_engine_that_is_untouched_goes_on(sync, engine, loader, step):
    old = dict(loader.weights)
    engine.fails[step] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom") as error:
        sync.push(2, overlap=False)
    assert "paused" not in error.value.cure
    assert not engine.paused
    assert_equal(loader.weights, old)
    assert sync.status() == [EngineStatus("engine0", 1, False)]


def test_a_torn_engine_stays_paused_until_a_push_heals_it(sync, engine, loader, source):
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel, match="layer") as error:
        sync.push(2)
    assert "still paused until a push succeeds: engine0" in error.value.cure
    assert error.value.cure.startswith("do not generate")
    assert engine.paused
    assert sync.status() == [PAUSED]
    engine.fails["seal"] = RuntimeError("boom")  # a push that never gets to the commit
    with pytest.raises(EngineError, match="boom") as error:
        sync.push(2)
    assert "still paused" in error.value.cure
    assert engine.paused
    assert sync.status() == [PAUSED]
    loader.fail = None
    sync.push(2)
    assert not engine.paused
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


def test_close_leaves_a_torn_engine_paused(sync, engine, loader):
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        sync.push(2)
    sync.close()
    assert engine.paused
    assert sync.status() == [PAUSED]


def test_a_torn_engine_that_another_session_left_paused_is_healed(
    sync, connect, engine, loader, source
):
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        sync.push(2)
    loader.fail = None
    second = connect(engine, source)
    assert second.status() == [EngineStatus("engine0", None, True, paused=True)]
    second.push(1)
    assert not engine.paused
    assert second.status() == [EngineStatus("engine0", 1, False)]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_that_somebody_else_has_paused_stays_so(sync, engine, loader, source, overlap):
    engine.paused = True
    sync.push(2, overlap=overlap)
    assert engine.paused
    assert "resume" not in engine.calls
    assert_equal(loader.weights, source)
    assert sync.status()[0].paused
    engine.fails["pause"] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom") as error:
        sync.push(3, overlap=overlap)
    assert "resume" not in engine.calls
    assert "paused" not in error.value.cure
    engine.paused = False
    sync.push(4, overlap=overlap)
    assert not engine.paused


@pytest.mark.parametrize("lost", [PeerDead("gone"), Timeout("slow")])
@pytest.mark.parametrize("reached", [False, True], ids=["before", "after"])
def test_a_commit_whose_answer_is_lost_is_asked_after_before_it_goes_on(
    sync, engine, monkeypatch, lost, reached
):
    finish = engine.finish_weight_update

    def losing(version=None):
        if reached:
            finish(version)
        raise lost

    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", losing)
        with pytest.raises(type(lost)) as error:
            sync.push(2)
    assert not error.value.cure
    assert not engine.paused
    assert sync.status() == [EngineStatus("engine0", 2 if reached else 1, False)]
    sync.push(3)


def test_an_engine_that_cannot_be_asked_stays_paused(sync, engine, loader, source, monkeypatch):
    def gone(*args):
        raise PeerDead("gone", cure="look at its log")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", gone)
        patch.setattr(engine, "update_weights", _but(engine.update_weights, "confirm", gone))
        with pytest.raises(PeerDead) as error:
            sync.push(2)
    assert error.value.cure.startswith(
        "look at its log; still paused until a push succeeds: engine0"
    )
    assert engine.paused
    assert sync.status() == [EngineStatus("engine0", 1, False, paused=True)]
    sync.push(3)
    assert not engine.paused
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 3, False)]


def _but(update, op, instead):
    return lambda info: instead() if info["op"] == op else update(info)


def test_close_lets_an_engine_go_on_that_was_asked_meanwhile(sync, engine, monkeypatch):
    def gone(*args):
        raise PeerDead("gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", gone)
        patch.setattr(engine, "update_weights", _but(engine.update_weights, "confirm", gone))
        with pytest.raises(PeerDead):
            sync.push(2)
        sync.status()
    assert sync.status() == [EngineStatus("engine0", 1, False, paused=True)]
    sync.close()
    assert not engine.paused


def test_a_finish_that_commits_nothing_lets_it_go_on(sync, engine, loader, monkeypatch):
    old = dict(loader.weights)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", lambda weight_version=None: None)
        with pytest.raises(Aborted, match="has not been committed"):
            sync.push(2)
    assert not engine.paused
    assert_equal(loader.weights, old)


def test_a_resume_that_fails_is_no_success(sync, engine, loader, source, monkeypatch):
    def refuse():
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "resume", refuse)
        with pytest.raises(EngineError, match="boom") as error:
            sync.push(2)
    assert "still paused until a push succeeds: engine0" in error.value.cure
    assert engine.paused
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False, paused=True)]
    sync.push(3)
    assert not engine.paused


def test_close_tries_a_resume_that_failed_again(sync, engine, monkeypatch):
    def refuse():
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "resume", refuse)
        with pytest.raises(EngineError, match="boom"):
            sync.push(2)
    sync.close()
    assert not engine.paused


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trainer_that_was_replaced_does_not_pause_the_others_engine(
    sync, connect, engine, source, overlap
):
    connect(engine, source)
    engine.calls.clear()
    with pytest.raises(Superseded):
        sync.push(2, overlap=overlap)
    assert not {"pause", "resume"} & set(engine.calls)


@pytest.mark.parametrize("loading", [False, True])
def test_a_trainer_that_is_replaced_within_its_pause_does_not_end_the_others(
    sync, connect, engine, source, loading
):
    """The other one may have paused it, and be loading."""
    start = engine.start_weight_update

    def replaced():
        connect(engine, source)
        if loading:
            start()
        start()

    engine.start_weight_update = replaced
    with pytest.raises(Superseded) as error:
        sync.push(2, overlap=False)
    assert "still paused" in error.value.cure
    assert engine.paused
    sync.close()
    assert engine.paused


def test_a_failure_of_a_trainer_that_was_replaced_says_so(sync, connect, engine, source):
    update = engine.update_weights

    def lost(info):
        if info["op"] == "seal":
            engine.update_weights = update
            connect(engine, source)
            raise RuntimeError("boom")
        update(info)

    engine.update_weights = lost
    with pytest.raises(Superseded) as error:
        sync.push(2)
    assert "boom" in str(error.value.__cause__)
    assert not engine.paused


# -- engines that load while they receive ----------------------------------------------------------


def test_an_engine_that_streams_is_paused_when_it_says_so(connect, transport_cls, loader, source):
    engine = PausingEngine(transport_cls, loader, streams=True)
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1)
    rest = ["open", "seal", "finish", "confirm", "resume"]
    assert engine.calls == ["start", "open", "pause", *rest]
    assert not engine.paused
    assert_equal(loader.weights, source)
    engine.calls.clear()
    sync.push(2)
    assert engine.calls == ["confirm", "pause", "start", *rest]
    assert sync.status() == [EngineStatus("engine0", 2, False)]


def test_one_that_is_idle_anyway_need_not_be(connect, transport_cls, loader, source):
    engine = PausingEngine(transport_cls, loader, streams=True)
    engine.pause = engine.resume = None
    engine.idle_between_calls = True
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1)
    assert engine.calls == ["start", "open", "seal", "finish", "confirm"]
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("why", ["no method", "no route"])
def test_one_that_cannot_be_paused_is_refused(connect, transport_cls, loader, source, why):
    engine = PausingEngine(transport_cls, loader, streams=True)
    if why == "no method":
        engine.pause = None
    else:
        engine.fails["pause"] = UnsupportedVllm("no such route")
    sync = connect(engine, source)
    for version in (1, 2):
        with pytest.raises(NotPaused, match="loads while it receives") as error:
            sync.push(version)
        assert error.value.engine == "engine0"
        assert 'staging="device" or "host"' in error.value.cure
        assert "pause() and resume()" in error.value.cure
        assert engine.calls[-1] == "abort"
    assert loader.weights == {}
    [status] = sync.status()
    assert (status.version, status.torn, status.error) == (None, False, None)


def test_one_that_is_paused_and_refuses_still(streaming):
    engine, sync = streaming
    engine.fails["open"] = NotPaused("odd")
    with pytest.raises(NotPaused, match="odd"):
        sync.push(2)
    assert engine.calls.count("open") == 1
    assert not engine.paused
    assert sync.status() == [EngineStatus("engine0", 1, False)]


@pytest.mark.parametrize("step", ["seal", "finish"])
def test_a_streamed_round_that_fails_is_torn_and_stays_paused(streaming, loader, source, step):
    engine, sync = streaming
    engine.fails[step] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom") as error:
        sync.push(2)
    assert "still paused until a push succeeds: engine0" in error.value.cure
    assert engine.paused
    assert (sync._members.links[0].torn, sync._members.links[0].whole) == (
        True,
        False,
    )  # known before it is asked
    assert sync.status() == [PAUSED]
    sync.push(3)
    assert not engine.paused
    assert_equal(loader.weights, source)


def test_a_streamed_round_that_fails_before_open_leaves_it_whole(streaming):
    engine, sync = streaming
    engine.fails["start"] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom"):
        sync.push(2)
    assert not engine.paused
    assert sync.status() == [EngineStatus("engine0", 1, False)]


def test_a_streamed_round_that_fails_where_nothing_can_be_asked_stays_paused(
    streaming, monkeypatch
):
    engine, sync = streaming

    def gone(*args):
        raise PeerDead("gone")

    with monkeypatch.context() as patch:
        update = engine.update_weights
        patch.setattr(
            engine,
            "update_weights",
            lambda info: gone() if "open" in engine.calls else update(info),
        )
        with pytest.raises(WeightTransferError, match="gone") as error:
            sync.push(2)
    assert "still paused" in error.value.cure
    assert engine.paused
    assert sync.status() == [PAUSED]


def test_an_idle_engine_that_streamed_in_vain_is_known_to_be_torn(
    connect, transport_cls, loader, source
):
    engine = PausingEngine(transport_cls, loader, streams=True)
    engine.pause = engine.resume = None
    engine.idle_between_calls = True
    sync = connect(engine, source)
    engine.fails["seal"] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom"):
        sync.push(1)
    assert engine.calls[-1] == "confirm"
    assert sync.status() == [EngineStatus("engine0", None, True)]
    sync.push(2)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("left", ["started", "receiving", "sealed"])
def test_a_trainer_that_ended_within_a_round_leaves_no_engine_paused(
    sync, connect, engine, source, left, reports
):
    """The next one to connect lets it go on; where workers tell nothing, nobody can know whose pause
    it is."""
    if reports:
        engine.reports = lambda: [engine.round.report()]
    engine.pause()
    engine.start_weight_update()
    sync._trainer.publish(2, Deadline(9))
    for op in ("open", "seal")[: ("started", "receiving", "sealed").index(left)]:
        engine.update_weights(sync._trainer.update_info(op, Deadline(9), known=1).to_wire())
        if op == "open":
            sync._trainer.send(1, Deadline(9), lambda: None)
    second = connect(engine, source)
    assert engine.paused != reports
    second.push(1)
    assert engine.paused != reports


def test_a_pause_outside_of_a_round_is_somebody_elses(sync, connect, engine, source):
    engine.reports = lambda: [engine.round.report()]
    engine.pause()
    second = connect(engine, source)
    assert engine.paused
    second.push(1)
    assert engine.paused


@pytest.mark.parametrize("call", ["seal", "finish"])
def test_a_pause_that_was_seen_to_be_somebody_elses_stays_after_a_torn_push(streaming, call):
    engine, sync = streaming
    engine.paused = True
    engine.fails[call] = RuntimeError("boom")
    with pytest.raises(WeightTransferError):
        sync.push(2)
    sync.push(3)
    assert engine.paused
