"""A round that the engine is asked for before the trainer has looked at its weights."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_wt.clients.local import Answer
from vllm_wt.deadline import Deadline
from vllm_wt.errors import Aborted, ManifestMismatch, PeerDead, Timeout, WeightTransferError
from vllm_wt.pausing import USUAL
from vllm_wt.results import EngineStatus
from vllm_wt.round import State
from vllm_wt.source import StateDictSource
from vllm_wt.sources.tensors import _Look

from .conftest import DictLoader
from .support.engines import RoundEngine, assert_equal, connecting


class AheadEngine(RoundEngine):
    """One that takes a round in one call, on a thread of its own.

    Attributes:
        hold: An event for which its answers wait.
        answers: Of the rounds that it was asked for.
        infos: What it was asked ahead.
        refuses: Whether it can't be.
    """

    hold = None
    may_leave = True

    def __init__(self, transport_cls, loader) -> None:
        super().__init__(transport_cls, loader)
        self._thread = ThreadPoolExecutor(1)
        self.infos = []
        self.answers = []
        self.refuses = False

    def ask_round(self, update_info, weight_version):
        if self.refuses:
            return None
        self.infos.append(update_info)
        answer = self._thread.submit(self._answered, update_info, weight_version)
        self.answers.append(Answer(answer, "run_round", 60, self.require_alive))
        return self.answers[-1]

    def _answered(self, update_info, weight_version):
        told = self.run_round(update_info, weight_version)
        if self.hold is not None:
            assert self.hold.wait(30)
        return told

    def require_alive(self):
        """Of another engine, raises once it has died."""


@pytest.fixture
def connect(monkeypatch, mapping_cls):
    with connecting(monkeypatch, mapping_cls) as connect:
        yield connect


class BatchLoader(DictLoader):
    """One that can be loaded at once, too."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        """Since the last batch."""

    def look(self):
        self.looks += 1

    def apply_batch(self, number, weights, *, looked):
        assert looked
        assert self.looks  # a round that was given up may have looked, too
        self.looks = 0
        self.apply(weights)


@pytest.fixture
def loader():
    return BatchLoader()


@pytest.fixture
def engine(mapping_cls, loader):
    engine = AheadEngine(mapping_cls, loader)
    yield engine
    engine.engine.shutdown()


class Watched(StateDictSource):
    """What happens while the engine has been asked and the trainer has not looked yet."""

    before_look = None

    def is_same(self):
        before, self.before_look = self.before_look, None
        if before is not None:
            before()
        return super().is_same()

    def _look(self):
        values = list(self._state.values())
        return _Look(list(self._state), values, values)


@pytest.fixture
def state():
    return {"a": torch.arange(12.0), "b": torch.ones(3)}


@pytest.fixture
def source(state):
    return Watched(state)


@pytest.fixture(params=["bytes", "digest"])
def verify(request):
    return request.param


@pytest.fixture(params=["auto", "none"])
def sync(request, connect, engine, source, state, verify):
    """A session that has pushed version 1, and found nothing to have moved."""
    sync = connect(engine, source, verify=verify, staging=request.param)
    sync.push(0)
    sync.push(1)
    engine.calls.clear()
    engine.infos.clear()
    state["a"].add_(1)
    return sync


def held(engine, version, *, torn=False):
    return [EngineStatus("engine0", version, torn)]


def test_not_before_a_push_has_found_nothing_to_have_moved(connect, engine, source):
    sync = connect(engine, source)
    for version in (1, 2):
        sync.push(version)
    assert engine.infos == []


def test_not_of_a_source_that_cannot_tell(connect, engine, loader, state):
    class Other(StateDictSource):
        """One that may go by something else."""

    sync = connect(engine, Other(state))
    for version in (1, 2, 3):
        state["a"].add_(1)
        sync.push(version)
        assert_equal(loader.weights, state)
    assert engine.infos == []


def test_each_push_after_that_is(sync, engine, loader, state):
    for version in (2, 3, 4):
        state["b"].mul_(2)
        result = sync.push(version)
        assert_equal(loader.weights, state)
        assert result.version == version
    assert [(info["op"], info["ahead"], info["version"]) for info in engine.infos] == [
        ("all", True, version) for version in (2, 3, 4)
    ]
    assert engine.calls == ["round"] * 3
    assert sync.status() == held(engine, 4)


def test_the_engine_waits_for_what_is_published(sync, engine, loader, source, state):
    """What is written between the call and the trainer's look is part of the version."""
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}

    def write():
        while "round" not in engine.calls:
            threading.Event().wait(0.001)
        assert_equal(loader.weights, old)
        state["a"].fill_(7)

    source.before_look = write
    sync.push(2)
    assert_equal(loader.weights, state)
    assert loader.weights["a"].eq(7).all()


def test_a_model_that_is_written_at_once_is_looked_at_before_the_trainer_publishes(
    sync, loader, source
):
    streams = sync._trainer._staging == "none"  # else it is looked at when all is verified
    deadline = Deadline(10)

    def wait():
        while streams and not loader.looks:
            deadline.check("The worker does not look at its model before there are weights")
            deadline.wait(0.001)

    source.before_look = wait
    sync.push(2)


def test_the_workers_word_is_enough(sync, engine, loader, source, state):
    """An answer takes longer than it takes the workers to tell the trainer."""
    engine.hold = threading.Event()
    result = sync.push(2)
    assert_equal(loader.weights, state)
    stages = result.engines["engine0"]
    assert 0 < stages.wire <= stages.wire + stages.load <= result.total_s
    answer = engine.answers[-1]
    assert not answer.has_come(0.0)
    engine.hold.set()
    assert answer.result() == engine.told
    assert sync.status() == held(engine, 2)
    state["a"].add_(1)
    sync.push(3)
    assert_equal(loader.weights, state)


def test_workers_that_do_not_tell(sync, engine, loader, state, monkeypatch):
    """Then it is the engine's answer that counts."""
    monkeypatch.setattr(engine.engine, "finish_weight_update", lambda: None)
    result = sync.push(2)
    assert_equal(loader.weights, state)
    assert result.engines["engine0"].load == engine.told[0]["load"]
    assert sync.status() == held(engine, 2)


def test_fewer_workers_than_there_are_tell(sync, engine, loader, state):
    sync._members.links[0].workers = 2
    engine.hold = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(sync.push, 2)
        engine.hold.set()
        pushing.result(30)
    assert engine.answers[-1].has_come(0.0)
    assert_equal(loader.weights, state)


def test_an_answer_that_must_be_waited_for(sync, engine, loader, state):
    engine.may_leave = False
    result = sync.push(2)
    assert engine.answers[-1].has_come(0.0)
    assert result.engines["engine0"].load == engine.told[0]["load"]
    assert_equal(loader.weights, state)


def test_an_interrupt_while_the_engine_is_asked(sync, engine, loader, state):
    """What was asked for is withdrawn: the engine goes on at once, with its old weights."""
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}
    ask = engine.ask_round

    def interrupted(info, version):
        ask(info, version)
        raise KeyboardInterrupt

    engine.ask_round = interrupted
    with pytest.raises(KeyboardInterrupt):
        sync.push(2)
    with pytest.raises(RuntimeError, match="given this attempt up"):
        engine.answers[-1].result()
    assert_equal(loader.weights, old)
    engine.ask_round = ask
    sync.push(3)
    assert_equal(loader.weights, state)


def test_an_interrupt_while_the_workers_load(sync, engine, loader, state):
    """They have what was published, and end with that."""
    loading, interrupted = threading.Event(), threading.Event()

    def interrupt():
        if loading.is_set() and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    apply = loader.apply

    def slow(weights):
        loading.set()
        assert interrupted.wait(30)
        apply(weights)

    engine.require_alive, loader.apply = interrupt, slow
    with pytest.raises(KeyboardInterrupt):
        sync.push(2)
    assert_equal(loader.weights, state)
    assert sync.status() == held(engine, 2)
    loader.apply = apply
    sync.push(3)


def test_an_interrupt_while_digests_are_made(sync, engine, loader, state):
    """Workers that need them cannot end by themselves, the others do."""
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}
    send = sync._trainer.send

    def interrupted(*args):
        raise KeyboardInterrupt

    sync._trainer.send = interrupted
    with pytest.raises(KeyboardInterrupt):
        sync.push(2)
    sync._trainer.send = send
    assert_equal(loader.weights, old if sync._trainer._verify == "digest" else state)
    assert sync.status()[0].torn is False
    sync.push(3)
    assert sync.status() == held(engine, 3)


def test_a_worker_that_waits_for_digests_hears_of_an_end(connect, engine, loader, state):
    sync = connect(engine, StateDictSource(state), verify="digest")
    sync.push(0)
    sync.push(1)
    sent = sync._trainer.send

    def write_first(*args):
        state["a"].add_(1)
        sent(*args)

    sync._trainer.send = write_first
    with pytest.raises(ManifestMismatch, match="written to"):
        sync.push(2)
    with pytest.raises(RuntimeError, match="given this attempt up"):
        engine.answers[-1].result()


def test_an_engine_that_dies_while_it_is_listened_to(sync, engine, monkeypatch):
    monkeypatch.setattr(engine.engine, "finish_weight_update", lambda: None)
    engine.hold = threading.Event()

    def died():
        raise PeerDead("gone")

    engine.require_alive = died
    with pytest.raises(PeerDead, match="gone"):
        sync.push(2)
    engine.hold.set()


def test_a_word_of_the_round_before_is_none_of_this(sync, engine, loader, source, state):
    """Its number is another one."""
    sync.push(2)
    trainer = sync._trainer
    assert (trainer.delivered(), trainer.committed(0.0)) == (1, 1)
    source.before_look = lambda: numbers.append((trainer.delivered(), trainer.committed(0.0)))
    numbers = []
    sync.push(3)
    assert numbers == [(0, 0)]


def test_memory_that_has_moved_is_asked_for_again(sync, engine, loader, state):
    for version in (2, 3):
        state["a"] = torch.full((12,), float(version))
        sync.push(version)
        assert_equal(loader.weights, state)
        assert sync.status() == held(engine, version)
    assert engine.calls.count("round") == 3  # after the first it was not asked ahead
    assert [info["handle"] for info in engine.infos] == [None]


def test_what_cannot_be_told_this_once_is_asked_for_again(sync, engine, loader, source, state):
    """Nothing has moved, so that only the trainer's word ends the first call."""
    look = source._look
    source._look = lambda: None
    sync.push(2)
    source._look = look
    assert_equal(loader.weights, state)
    assert engine.calls.count("round") == 2
    assert sync.status() == held(engine, 2)


def test_a_source_that_fails_leaves_the_old_weights(sync, engine, loader, source, state):
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}

    def fail():
        raise ZeroDivisionError("in the source")

    source.before_look = fail
    with pytest.raises(WeightTransferError, match="in the source"):
        sync.push(2)
    assert engine.calls[0] == "round"
    assert_equal(loader.weights, old)
    assert sync.status() == held(engine, 1)
    sync.push(2)
    assert_equal(loader.weights, state)
    assert sync.status() == held(engine, 2)


def test_other_weights_than_announced_leave_the_old_ones(sync, engine, loader, state):
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}
    state["b"] = torch.ones(4)
    with pytest.raises(ManifestMismatch):
        sync.push(2)
    assert_equal(loader.weights, old)
    assert sync.status() == held(engine, 1)
    state["b"] = torch.ones(3)
    sync.push(2)
    assert_equal(loader.weights, state)


def test_a_trainer_that_is_stopped_before_it_looks(sync, engine, loader, source):
    """The engine is on its own: it gives up at the deadline, with its old weights."""
    old = {name: tensor.clone() for name, tensor in loader.weights.items()}

    def stop():
        engine._thread.submit(lambda: None).result()  # it is done with the round
        assert engine.round.state is State.IDLE
        assert_equal(loader.weights, old)

    source.before_look = stop
    with pytest.raises(Timeout):
        sync.push(2, deadline_s=0.3)
    assert_equal(loader.weights, old)
    sync.push(3)
    assert sync.status() == held(engine, 3)


def test_an_engine_that_cannot_after_all(sync, engine, loader, state):
    engine.refuses = True
    sync.push(2)
    assert_equal(loader.weights, state)
    assert engine.calls == ["round"]
    assert engine.infos == []
    engine.refuses = False
    sync.push(3)
    assert len(engine.infos) == 1


def test_an_engine_that_has_died_when_it_is_asked(sync, engine, loader, state):
    ask = engine.ask_round

    def dead(info, version):
        raise PeerDead("gone")

    engine.ask_round = dead
    with pytest.raises(PeerDead):
        sync.push(2)
    engine.ask_round = ask
    sync.push(2)
    assert_equal(loader.weights, state)
    assert sync.status() == held(engine, 2)


def test_a_round_that_was_left_open_is_ended_first(sync, engine, loader, state):
    engine.round.start()
    sync.push(2)
    assert_equal(loader.weights, state)
    assert engine.calls == ["round", "abort", "round"]
    assert sync.status() == held(engine, 2)


def test_what_is_handed_over_in_chunks_is_not(sync, engine):
    """`begin` comes long before `end`: no engine is kept waiting for it."""
    delivery = sync._new(2, Deadline(30), USUAL).delivery
    delivery.begin()
    assert engine.infos == []
    delivery.give_up(Aborted("the test"))
