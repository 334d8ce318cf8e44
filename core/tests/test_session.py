"""WeightSync to a worker in this process: the whole path but vLLM and a real fabric."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from vllm_wt import registry, session
from vllm_wt.clients.limits import shown
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    BackendUnavailable,
    EngineError,
    InvalidInfo,
    ManifestMismatch,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.exposed import Exposed
from vllm_wt.session import WeightSync
from vllm_wt.source import StateDictSource

from .support.engines import InProcessEngine, assert_equal, connecting


@pytest.fixture
def engine(transport_cls, loader):
    return InProcessEngine(transport_cls, loader)


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls) as connect:
        yield connect


class Odd:
    """Nothing can be made of it, not even a text."""

    def __index__(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise ZeroDivisionError


def state() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "plain": base.clone(),
        "transposed": base.clone().t(),
        "every_second": base.clone()[:, ::2],
        "offset": base.clone()[1:3],
        "expanded": torch.tensor([7.0]).expand(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch._neg_view(torch.tensor([1.0, -2.0])),
        "mask": torch.tensor([True, False, True]),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
    }


def test_every_kind_of_tensor_arrives_bit_for_bit(connect, engine, loader):
    source = state()
    sync = connect(engine, source)
    for version in (1, 2, 3):
        for tensor in source.values():
            if (
                tensor.dtype == torch.float32
                and tensor.numel()
                and tensor.shape not in {(5,), (2,)}
            ):
                tensor.add_(version)
        result = sync.push(version)
        assert_equal(loader.weights, source)
        assert result.nbytes == sum(t.numel() * t.element_size() for t in source.values())
        assert result.tensors == len(source)
    one = ["start", "open", "seal", "finish", "confirm"]
    assert engine.calls == ["init", "confirm", *one, *one, *one]
    assert sync.status() == [session.EngineStatus("engine0", 3, False)]


def test_only_empty_tensors(connect, engine, loader):
    source = {"a": torch.empty(0), "b": torch.empty(3, 0)}
    connect(engine, source).push(1)
    assert_equal(loader.weights, source)


def test_steady_rounds_register_nothing(connect, engine, fabric):
    sync = connect(engine, state())
    sync.push(1)
    before = [endpoint.registrations for endpoint in fabric.endpoints]
    arena = engine.engine._arena._buffer.data_ptr()
    for version in range(2, 6):
        sync.push(version)
    assert [endpoint.registrations for endpoint in fabric.endpoints] == before
    assert engine.engine._arena._buffer.data_ptr() == arena


def test_memory_that_moved_is_exposed_anew(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    source["plain"] = torch.full((4, 6), 9.0)
    sync.push(2)
    assert_equal(loader.weights, source)
    assert [generation for _, generation in fabric.exposed] == [2]


def test_memory_that_was_freed_is_other_memory_at_the_same_address_too():
    tensor = torch.ones(24)
    former, again = Exposed([tensor]), Exposed([tensor])
    again.memory = [torch.ones(96, dtype=torch.uint8)]
    assert former.has_same_memory(again)
    tensor.untyped_storage().resize_(0)
    assert not former.has_same_memory(again)


def test_memory_that_could_not_be_registered_is_tried_again(
    connect, engine, loader, transport_cls, monkeypatch
):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    source["plain"] = torch.full((4, 6), 9.0)

    def refuse(self, buffers):
        raise TransportError("no memory to pin")

    with monkeypatch.context() as patch:
        patch.setattr(transport_cls, "register", refuse)
        with pytest.raises(TransportError, match="no memory to pin"):
            sync.push(2)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_moved_memory_is_told_again_when_the_round_that_told_it_failed(
    connect, engine, loader, fabric
):
    source = state()
    sync = connect(engine, source)
    source["plain"] = torch.full((4, 6), 9.0)
    engine.round._backend, update = "memory", engine.update_weights
    engine.update_weights = lambda info: update(info | {"session": "other"})
    with pytest.raises(Superseded, match="Another trainer"):
        sync.push(1)
    engine.update_weights = update
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(new=torch.ones(1)), "unexpected ['new']"),
        (lambda s: s.pop("half"), "missing ['half']"),
        (lambda s: s.update(plain=torch.ones(6, 4)), "[6, 4]"),
        (lambda s: s.update(plain=torch.ones(4, 6, dtype=torch.float64)), "float64"),
        (lambda s: s.update(plain=s.pop("plain")), "transposed"),
    ],
    ids=["added", "removed", "shape", "dtype", "order"],
)
def test_a_source_that_changed_is_refused_before_the_engine_hears_of_it(
    connect, engine, change, message
):
    source = state()
    sync = connect(engine, source)
    engine.calls.clear()
    change(source)
    with pytest.raises(ManifestMismatch) as error:
        sync.push(1)
    assert message in str(error.value)
    assert engine.calls == []


def test_a_failed_read_is_followed_by_a_fresh_connection(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    fabric.fail_submit = OSError("cable")
    with pytest.raises(TransportError, match="OSError: cable"):
        sync.push(1)
    assert engine.calls[-1] == "abort"
    assert loader.weights == {}
    fabric.fail_submit = None
    sync.push(2)
    assert_equal(loader.weights, source)
    trainer, first, second = fabric.endpoints
    assert first.closed
    assert not second.closed
    assert not trainer.closed


def test_deadline_of_a_read_that_stalls(connect, engine, loader, fabric):
    sync = connect(engine, state())
    fabric.hold = True
    with pytest.raises(Timeout):
        sync.push(1, deadline_s=0.1)
    fabric.hold = False
    sync.push(2)
    assert sync.status()[0].version == 2


def test_a_buffer_that_may_still_be_written_to_is_never_used_again(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    arena = engine.engine._arena._buffer
    fabric.hold, fabric.quiesces = True, False
    with pytest.raises(Timeout):
        sync.push(1, deadline_s=0.1)
    fabric.hold = False
    sync.push(2)
    assert engine.engine._arena._buffer.data_ptr() != arena.data_ptr()
    held = [reading._arena.data_ptr() for reading in engine.engine._quarantine]
    assert held == [arena.data_ptr()]
    fabric.fail_submit = OSError("cable")
    with pytest.raises(TransportError):
        sync.push(3)
    fabric.fail_submit, fabric.quiesces = None, True
    sync.push(4)
    assert engine.engine._quarantine == []


def test_a_stalled_read_ends_by_itself_when_nobody_asks(connect, engine, fabric):
    """The worker keeps its deadline without a client: the trainer may be dead."""
    sync = connect(engine, state())
    engine.start_weight_update()
    sync._trainer.publish(1, Deadline(0.05))
    info = sync._trainer.update_info("open", Deadline(0.05), known=1)
    fabric.hold = True
    with pytest.raises(Timeout, match="not read in time") as error:
        engine.engine.receive_weights(info, lambda weights: None)

    assert error.value.got.startswith("0 of ")


def test_a_late_report_is_not_taken_for_the_next_rounds(connect, engine, fabric):
    sync = connect(engine, state())
    sync.push(1)
    assert sync._trainer.delivered() == 1
    sync._trainer.publish(2, Deadline(1))
    assert sync._trainer.delivered() == 0


def test_a_connection_that_fails_is_closed_on_both_sides(
    connect, engine, fabric, transport_cls, monkeypatch
):
    def refuse(self, owner, generation, handle, deadline):
        raise PeerDead("nobody there")

    monkeypatch.setattr(transport_cls, "open", refuse)
    with pytest.raises(PeerDead, match="nobody there"):
        connect(engine, state())
    assert [endpoint.closed for endpoint in fabric.endpoints] == [True, True]


def test_handles_travel_only_when_memory_has_moved(connect, engine):
    infos = []
    update = engine.update_weights
    engine.update_weights = lambda info: (infos.append(info), update(info))
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    source["plain"] = torch.full((4, 6), 9.0)
    sync.push(2)
    sync.push(3)
    handles = [info["handle"] is not None for info in infos if info["op"] == "open"]
    assert handles == [False, True, False]


def test_torn_engine_is_named_until_a_full_push(connect, engine, loader):
    sync = connect(engine, state())
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        sync.push(1)
    assert sync.status()[0].torn
    loader.fail = None
    sync.push(2)
    assert sync.status() == [session.EngineStatus("engine0", 2, False)]


def test_a_torn_engine_is_named_to_the_next_trainer(connect, engine, loader):
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        connect(engine, state()).push(1)
    loader.fail = None
    second = connect(engine, state())
    assert second.status() == [session.EngineStatus("engine0", None, True)]
    second.push(1)
    assert second.status() == [session.EngineStatus("engine0", 1, False)]


@pytest.mark.parametrize("left", ["start", "open", "seal"])
def test_a_round_that_a_dead_trainer_left_is_given_up(connect, engine, loader, left):
    first = connect(engine, state())
    engine.start_weight_update()
    first._trainer.publish(1, Deadline(9))
    for op in ("open", "seal") if left == "seal" else (left,) if left == "open" else ():
        engine.update_weights(first._trainer.update_info(op, Deadline(9), known=1).to_wire())
        if op == "open":
            first._trainer.send(1, Deadline(9), lambda: None)
    source = {"plain": torch.full((3,), 5.0)}
    second = connect(engine, source)
    assert loader.weights == {}
    second.push(1)
    assert_equal(loader.weights, source)


def test_two_trainers_in_turns(connect, engine, loader):
    """The one that was replaced is told so, whatever it does, and harms no round of the other."""
    sources = [{"a": torch.full((3,), float(n))} for n in range(2)]
    first, second = (connect(engine, source) for source in sources)
    for version in range(1, 4):
        with pytest.raises(Superseded) as error:
            first.push(version)
        assert "connect again" in error.value.cure
        second.push(version)
        assert_equal(loader.weights, sources[1])


def _lose_the_answer(engine, monkeypatch, method, op=None, error=None):
    """The call reaches the engine; what comes back is an error of the way there."""
    original = getattr(engine, method)

    def lost(*args):
        original(*args)
        if op is None or args[0]["op"] == op:
            monkeypatch.setattr(engine, method, original)
            raise error or ConnectionResetError("reset by peer")

    monkeypatch.setattr(engine, method, lost)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), Timeout("slow"), PeerDead("gone")]
)
@pytest.mark.parametrize(
    ("method", "op"),
    [("start_weight_update", None), ("update_weights", "open"), ("update_weights", "seal")],
)
def test_a_lost_answer_before_the_commit_commits_nothing(
    connect, engine, loader, monkeypatch, method, op, error
):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    before = dict(loader.weights)
    source["plain"].add_(1)
    _lose_the_answer(engine, monkeypatch, method, op, error)
    with pytest.raises(WeightTransferError):
        sync.push(2)
    assert_equal(loader.weights, before)
    assert sync.status() == [session.EngineStatus("engine0", 1, False)]
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_lost_answer_to_the_commit_is_asked_after(connect, engine, loader, monkeypatch):
    source = state()
    sync = connect(engine, source)
    _lose_the_answer(engine, monkeypatch, "finish_weight_update")
    assert sync.push(1).version == 1
    assert_equal(loader.weights, source)
    assert sync.status() == [session.EngineStatus("engine0", 1, False)]


def test_a_commit_whose_answer_never_comes_is_learnt_by_status(
    connect, engine, loader, monkeypatch
):
    sync = connect(engine, state())
    _lose_the_answer(engine, monkeypatch, "finish_weight_update", error=Timeout("no answer"))
    with pytest.raises(Timeout):
        sync.push(1)
    assert sync.status() == [session.EngineStatus("engine0", 1, False)]


def test_a_finish_that_commits_nothing_is_no_success(connect, engine, loader, monkeypatch):
    """vLLM's answer is the same; ours is that of the workers."""
    sync = connect(engine, state())
    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", lambda weight_version=None: None)
        with pytest.raises(Aborted, match="has not been committed"):
            sync.push(1)
    assert loader.weights == {}
    assert sync.status() == [session.EngineStatus("engine0", None, False)]


def test_status_of_an_engine_that_has_gone(connect, engine, monkeypatch):
    sync = connect(engine, state())
    sync.push(1)

    def gone(info):
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(engine, "update_weights", gone)
    (status,) = sync.status()
    assert (status.version, status.torn) == (1, False)
    assert "nobody listens" in status.error


def test_memory_that_is_freed_during_a_push_is_never_committed(
    connect, engine, loader, fabric, monkeypatch
):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    before = dict(loader.weights)
    update = engine.update_weights

    fabric.hold = True  # this fabric would read what is freed

    def freeing(info):
        update(info)
        if info["op"] == "open":
            source["plain"].untyped_storage().resize_(0)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", freeing)
        with pytest.raises(ManifestMismatch, match="freed or resized while the workers") as error:
            sync.push(2)
    fabric.hold = False
    assert error.value.cure.startswith("let push return before memory is freed")
    assert_equal(loader.weights, before)
    with pytest.raises(ManifestMismatch, match="memory of tensor 'plain' has been freed") as error:
        sync.push(2)
    assert (error.value.expected, error.value.got) == ("96 bytes", "a storage of 0 bytes")
    source["plain"] = torch.full((4, 6), 9.0)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_source_that_fails(connect, engine, loader):
    class Failing(StateDictSource):
        fail = False

        def _items(self):
            if self.fail:
                raise ZeroDivisionError("odd")
            return super()._items()

    source = Failing({"a": torch.ones(3)})
    sync = connect(engine, source)
    engine.calls.clear()
    source.fail = True
    with pytest.raises(TransportError, match="could not be read: ZeroDivisionError: odd") as error:
        sync.push(1)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert engine.calls == []
    with pytest.raises(TransportError, match="could not be read"):
        connect(engine, source)
    source.fail = False
    sync.push(1)
    assert loader.weights


def test_values_that_change_during_a_push_are_never_committed(connect, engine, loader, monkeypatch):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    before = dict(loader.weights)
    update = engine.update_weights

    def training(info):
        update(info)
        if info["op"] == "open":
            source["plain"].add_(1)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", training)
        with pytest.raises(ManifestMismatch, match="written to while the workers") as error:
            sync.push(2)
    assert "before the next training step" in error.value.cure
    assert_equal(loader.weights, before)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_another_parameter_over_the_same_memory_is_no_change(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    for version in (1, 2, 3):
        with torch.no_grad():
            source["plain"].mul_(version)
        source["plain"] = torch.nn.Parameter(source["plain"].detach())
        source["plain"].data = source["plain"].data
        sync.push(version)
        assert_equal(loader.weights, source)
    assert [generation for _, generation in fabric.exposed] == [1]


def test_tensors_of_inference_mode_are_taken(connect, engine, loader):
    with torch.inference_mode():
        source = {"a": torch.ones(3)}
    connect(engine, source).push(1)
    assert_equal(loader.weights, source)


def test_a_source_that_changes_after_the_commit_changes_nothing_of_the_result(
    connect, engine, loader, monkeypatch
):
    source = {"a": torch.ones(3)}
    sync = connect(engine, source)
    finish = engine.finish_weight_update

    def then_change(weight_version=None):
        finish(weight_version)
        source["b"] = None

    monkeypatch.setattr(engine, "finish_weight_update", then_change)
    result = sync.push(1)
    assert (result.tensors, result.nbytes) == (1, 12)


def test_a_torn_engine_that_cannot_be_asked_stays_torn(connect, engine, loader, monkeypatch):
    sync = connect(engine, state())
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel):
        sync.push(1)

    def gone(*args):
        raise PeerDead("nobody there")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "finish_weight_update", gone)
        with pytest.raises(PeerDead):
            sync.push(2)
        patch.setattr(engine, "update_weights", gone)
        (status,) = sync.status()
    assert status.torn
    assert "nobody there" in status.error


def test_tensors_that_are_made_for_a_pass_are_copied(connect, engine, loader, fabric):
    class Made(StateDictSource):
        made = frozenset(["a"])

        def __iter__(self):
            for name, tensor in super().__iter__():
                yield name, tensor.clone()

    kept = {"a": torch.ones(3)}
    sync = connect(engine, Made(kept))
    for version in (1, 2, 3):
        kept["a"].add_(1)
        sync.push(version)
        assert_equal(loader.weights, kept)
    assert [generation for _, generation in fabric.exposed] == [1]


@pytest.mark.parametrize(
    "version",
    [-1, 2**63, 1.0, True, "1", None, float("nan"), torch.ones(2), torch.tensor(1.5), Odd()],
)
def test_what_cannot_be_a_version(connect, engine, version):
    sync = connect(engine, state())
    engine.calls.clear()
    with pytest.raises(InvalidInfo, match="cannot be a version") as error:
        sync.push(version)
    assert error.value.where == "version"
    assert "an integer from 0" in error.value.expected
    assert error.value.got == shown(version)
    assert engine.calls == []


@pytest.mark.parametrize("version", [0, np.int64(3), torch.tensor(7)])
def test_integers_of_any_library_are_versions(connect, engine, version):
    sync = connect(engine, state())
    assert sync.push(version).version == int(version)
    assert sync.status()[0].version == int(version)


@pytest.mark.parametrize("version", [4, 5])
def test_a_version_that_does_not_advance(connect, engine, loader, version):
    sync = connect(engine, state())
    sync.push(5)
    engine.calls.clear()
    with pytest.raises(InvalidInfo, match="does not advance") as error:
        sync.push(version)
    assert error.value.expected == "more than 5, which engine0 has"
    assert error.value.got == str(version)
    assert engine.calls == []
    sync.push(6)


@pytest.mark.parametrize(
    "seconds", [0, -1, float("nan"), float("inf"), True, "5", None, 86401, 10**400, Odd()]
)
def test_what_cannot_be_a_deadline(connect, engine, seconds):
    with pytest.raises(InvalidInfo, match="cannot be a deadline") as error:
        connect(engine, state(), deadline_s=seconds)
    assert (error.value.where, error.value.got) == ("deadline_s", shown(seconds))
    sync = connect(engine, state())
    with pytest.raises(InvalidInfo, match="cannot be a deadline"):
        sync.push(1, deadline_s=seconds)


def test_a_push_from_a_second_thread_is_refused(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    entered, go = threading.Event(), threading.Event()
    start = engine.start_weight_update

    def waiting():
        entered.set()
        assert go.wait(20)
        start()

    engine.start_weight_update = waiting
    first = threading.Thread(target=sync.push, args=(1,))
    first.start()
    assert entered.wait(20)
    for call in (lambda: sync.push(2), sync.close, sync.status):
        with pytest.raises(WrongOrder, match="while another call of this session") as error:
            call()
        assert "wait for the first" in error.value.cure
    go.set()
    first.join(20)
    assert_equal(loader.weights, source)
    assert sync.status()[0].version == 1


@pytest.mark.parametrize("world_size", [None, lambda: None], ids=["no method", "not known"])
def test_an_engine_that_does_not_tell_its_size_is_waited_for_by_the_seal(
    connect, engine, loader, world_size
):
    engine.world_size = world_size
    connect(engine, state()).push(1)
    assert "poll" not in engine.calls
    assert loader.weights


def test_a_dead_trainer_side_ends_the_wait(connect, engine, fabric, monkeypatch):
    sync = connect(engine, state())
    fabric.hold = True
    trainer_endpoint = fabric.endpoints[0]

    def progress():
        raise PeerDead("the fabric has gone")

    monkeypatch.setattr(trainer_endpoint, "progress", progress)
    with pytest.raises(PeerDead, match="the fabric has gone"):
        sync.push(1)


def test_words_of_an_engine_that_is_not_ours(connect, engine):
    def start():
        raise RuntimeError("EngineCore died")

    sync = connect(engine, state())
    engine.start_weight_update = start
    with pytest.raises(EngineError, match="EngineCore died") as error:
        sync.push(1)
    assert (error.value.where, error.value.engine) == ("start_weight_update", "engine0")


def test_observers_hear_of_rounds(connect, engine, fabric):
    heard = []

    class Observer:
        @registry.hookspecs.hookimpl
        def vllm_wt_round_started(self, version):
            heard.append(("started", version))

        @registry.hookspecs.hookimpl
        def vllm_wt_round_finished(self, stats):
            heard.append(("finished", stats.version))

        @registry.hookspecs.hookimpl
        def vllm_wt_round_failed(self, version, error):
            heard.append(("failed", version, type(error)))

    observer = Observer()
    hooks = registry.default().hooks
    hooks.register(observer)
    try:
        sync = connect(engine, state())
        sync.push(1)
        fabric.fail_submit = OSError("cable")
        with pytest.raises(TransportError):
            sync.push(2)
    finally:
        hooks.unregister(observer)
    assert heard == [("started", 1), ("finished", 1), ("started", 2), ("failed", 2, TransportError)]


def test_an_observer_that_fails_is_logged(connect, engine, loader, caplog):
    class Observer:
        @registry.hookspecs.hookimpl
        def vllm_wt_round_started(self, version):
            raise ZeroDivisionError("odd")

    observer = Observer()
    hooks = registry.default().hooks
    hooks.register(observer)
    try:
        connect(engine, state()).push(1)
    finally:
        hooks.unregister(observer)
    assert loader.weights
    assert "an observer failed in vllm_wt_round_started" in caplog.text


def test_push_after_close(connect, engine):
    sync = connect(engine, state())
    sync.close()
    sync.close()
    with pytest.raises(WrongOrder, match="after close"):
        sync.push(1)


def test_no_thread_outlives_a_push(connect, engine, monkeypatch):
    monkeypatch.setattr("vllm_wt.polling._FIRST_S", 60.0)  # it is asked on a thread that is kept
    sync = connect(engine, state())
    before = set(threading.enumerate())
    sync.push(1)
    assert set(threading.enumerate()) <= before  # an earlier test's may end meanwhile


class _AsyncLLM:
    """Known by its name, since vllm is not imported for it."""


_AsyncLLM.__name__ = "AsyncLLM"


@pytest.mark.parametrize(
    ("engines", "source", "error_cls", "message", "cure"),
    [
        ([], {"a": torch.ones(1)}, InvalidInfo, "no engines", "at least one"),
        (object(), {"a": torch.ones(1)}, InvalidInfo, "cannot be an engine", "wrap it"),
        ("engine:8000", {"a": torch.ones(1)}, InvalidInfo, "neither http nor https", "put http://"),
        (_AsyncLLM(), {"a": torch.ones(1)}, InvalidInfo, "event loop", "AsyncLocalClient"),
        (["http://a", "http://a"], {"a": torch.ones(1)}, InvalidInfo, "given twice", "leave one"),
        (None, 3, InvalidInfo, "cannot be a source", ""),
        (None, {}, ManifestMismatch, "no tensors", "wraps the module"),
    ],
)
def test_wrong_arguments_of_connect(connect, engine, engines, source, error_cls, message, cure):
    with pytest.raises(error_cls, match=message) as error:
        connect(engine if engines is None else engines, source)
    assert cure in (error.value.cure or "")
    assert engine.calls == []


@pytest.mark.parametrize("workers", [0, -1, True, "2", 1.5])
def test_an_engine_that_does_not_know_its_workers(connect, engine, workers):
    engine.world_size = lambda: workers
    with pytest.raises(EngineError, match="how many workers") as error:
        connect(engine, state())
    assert (error.value.where, error.value.engine) == ("world_size", "engine0")
    assert error.value.got == repr(workers)


@pytest.mark.parametrize("configured", ["memory", "wt_memory", None])
def test_an_engine_of_the_right_backend(connect, engine, loader, configured):
    engine.configured_backend = lambda: configured
    connect(engine, state()).push(1)
    assert loader.weights


@pytest.mark.parametrize(
    ("configured", "got"), [("nccl", "'nccl'"), ("", "no weight_transfer_config")]
)
def test_an_engine_of_another_backend_is_not_called(connect, engine, configured, got):
    """At TP 2 vLLM's refusal, by every rank, would put its replies out of step."""
    engine.configured_backend = lambda: configured
    with pytest.raises(InvalidInfo, match="not started for this backend") as error:
        connect(engine, state())
    assert (error.value.where, error.value.got) == ("weight_transfer_config", got)
    assert error.value.expected == "backend 'memory' or 'wt_memory'"
    assert error.value.cure == 'start it with weight_transfer_config={"backend": "memory"}'
    assert engine.calls == []


@pytest.mark.parametrize("backend", [None, 3, ["rdma"]])
def test_a_backend_that_is_no_name(engine, backend):
    with pytest.raises(InvalidInfo, match="given by its name") as error:
        WeightSync.connect(engine, backend=backend, source={"a": torch.ones(1)})
    assert error.value.got == repr(backend)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("nosuch", "`vllm-wt list` shows what is installed; each backend comes in a package"),
        ("rdmaa", "did you mean 'rdma'? `vllm-wt list`"),
        ("sharded_rdt", "choose one of these; 'sharded_rdt' is a backend of vLLM's own"),
    ],
)
def test_unknown_backend(engine, name, cure):
    with pytest.raises(BackendUnavailable, match=f"no backend '{name}'") as error:
        WeightSync.connect(engine, backend=name, source={"a": torch.ones(1)})
    assert error.value.cure.startswith(cure)
    assert "'rdma'" in error.value.expected


def test_unknown_option(engine):
    with pytest.raises(InvalidInfo, match="'rdma' has no option 'ports'") as error:
        WeightSync.connect(engine, backend="rdma", source={"a": torch.ones(1)}, ports=3)
    assert (
        error.value.expected
        == "one of verify, staging, bucket_nbytes, transport, devices, emulation"
    )
