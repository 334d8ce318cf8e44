"""WeightSync to a worker in this process: the whole path but vLLM and a real fabric."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_wt import registry, session
from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import (
    BackendUnavailable,
    EngineError,
    InvalidInfo,
    ManifestMismatch,
    PeerDead,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.packing import as_bytes
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.ranks import SingleRank
from vllm_wt.round import WorkerRound
from vllm_wt.session import WeightSync


class InProcessEngine:
    """vLLM's four methods over a round; errors cross as text, as they do in vLLM."""

    def __init__(self, transport_cls, loader) -> None:
        context = WorkerContext(backend="memory", device=torch.device("cpu"), rank=0, size=1)
        self.engine = PullEngine(context, transport_cls)
        self.round = WorkerRound(self.engine, loader, SingleRank())
        self.calls: list[str] = []

    def _call(self, name, step, *args):
        self.calls.append(name)
        try:
            step(*args)
        except WeightTransferError as error:
            from vllm_wt.errors import to_text

            raise RuntimeError(f"Worker failed with error '{to_text(error)}', please") from None

    def init_weight_transfer_engine(self, init_info):
        self._call("init", self.round.init, init_info)

    def start_weight_update(self):
        self._call("start", self.round.start)

    def update_weights(self, update_info):
        self._call(update_info["op"], self.round.update, update_info)

    def finish_weight_update(self, weight_version=None):
        self._call("finish", self.round.finish)

    def world_size(self):
        return 1


@pytest.fixture
def engine(transport_cls, loader):
    return InProcessEngine(transport_cls, loader)


@pytest.fixture
def connect(monkeypatch, transport_cls):
    """``WeightSync.connect`` with the memory fabric as its backend."""
    monkeypatch.setattr(
        session,
        "trainer_engine",
        lambda backend, source: PullTrainer(source, backend=backend, transport_cls=transport_cls),
    )
    opened = []

    def connect(engines, source, **options):
        sync = WeightSync.connect(engines, backend="memory", source=source, **options)
        opened.append(sync)
        return sync

    yield connect
    for sync in opened:
        sync.close()


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


def assert_equal(received, sent) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].shape == tensor.shape
        assert torch.equal(
            as_bytes(received[name]), as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
        ), name


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
    assert engine.calls == ["init"] + 3 * ["start", "open", "seal", "finish"]
    assert sync.status() == [session.EngineStatus("engine0", 3, False)]


def test_only_empty_tensors(connect, engine, loader):
    source = {"a": torch.empty(0), "b": torch.empty(3, 0)}
    connect(engine, source).push(1)
    assert_equal(loader.weights, source)


def test_steady_rounds_register_nothing(connect, engine, fabric):
    sync = connect(engine, state())
    sync.push(1)
    before = [endpoint.registrations for endpoint in fabric.endpoints]
    arena = engine.engine._arena.data_ptr()
    for version in range(2, 6):
        sync.push(version)
    assert [endpoint.registrations for endpoint in fabric.endpoints] == before
    assert engine.engine._arena.data_ptr() == arena


def test_memory_that_moved_is_exposed_anew(connect, engine, loader, fabric):
    source = state()
    sync = connect(engine, source)
    sync.push(1)
    source["plain"] = torch.full((4, 6), 9.0)
    sync.push(2)
    assert_equal(loader.weights, source)
    assert [generation for _, generation in fabric.exposed] == [2]


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
    with pytest.raises(InvalidInfo, match="Another trainer"):
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
    assert engine.calls[-1] == "finish"
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
    arena = engine.engine._arena
    fabric.hold, fabric.quiesces = True, False
    with pytest.raises(Timeout):
        sync.push(1, deadline_s=0.1)
    fabric.hold = False
    sync.push(2)
    assert engine.engine._arena.data_ptr() != arena.data_ptr()
    assert [held[2] is arena for held in engine.engine._quarantine] == [True]
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
    nbytes = sum(t.numel() * t.element_size() for t in state().values())
    assert error.value.got == f"0 of {nbytes} bytes"


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
    assert engine.calls[-3:] == ["finish", "start", "finish"]
    loader.fail = None
    sync.push(2)
    assert sync.status() == [session.EngineStatus("engine0", 2, False)]


def test_a_stale_round_is_closed_at_connect(connect, engine, loader):
    connect(engine, state())
    engine.start_weight_update()
    second = connect(engine, state())
    second.push(1)
    assert loader.weights


def test_an_engine_that_does_not_tell_its_size_is_waited_for_by_the_seal(connect, engine, loader):
    engine.world_size = None
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
    assert error.value.where == "start_weight_update of engine0"


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


def test_push_after_close(connect, engine):
    sync = connect(engine, state())
    sync.close()
    sync.close()
    with pytest.raises(WrongOrder, match="after close"):
        sync.push(1)


def test_no_thread_outlives_a_push(connect, engine):
    before = set(threading.enumerate())
    sync = connect(engine, state())
    sync.push(1)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    ("engines", "source", "error_cls", "message"),
    [
        ([], {"a": torch.ones(1)}, InvalidInfo, "no engines"),
        (object(), {"a": torch.ones(1)}, InvalidInfo, "cannot be an engine"),
        (None, 3, InvalidInfo, "cannot be a source"),
        (None, {}, ManifestMismatch, "no tensors"),
    ],
)
def test_wrong_arguments_of_connect(connect, engine, engines, source, error_cls, message):
    with pytest.raises(error_cls, match=message):
        connect(engine if engines is None else engines, source)


def test_unknown_backend(engine):
    with pytest.raises(BackendUnavailable, match="no backend 'nosuch'") as error:
        WeightSync.connect(engine, backend="nosuch", source={"a": torch.ones(1)})
    assert error.value.cure == "pip install vllm-wt-nosuch"
