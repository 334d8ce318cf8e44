"""begin, send and end: a round whose tensors the trainer hands over, some at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_wt import session
from vllm_wt.deadline import Deadline
from vllm_wt.delivery import Delivery
from vllm_wt.digests import BLOCK
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import (
    Aborted,
    InvalidInfo,
    ManifestMismatch,
    PeerDead,
    Timeout,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.pull import PullTrainer
from vllm_wt.results import EngineStatus
from vllm_wt.source import Announced

from .conftest import DictLoader
from .support.engines import PausingEngine, assert_equal, connecting


class Trainer(PullTrainer):
    """With buckets so small that the tensors go round the ring; notes what it is asked."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, bucket_nbytes=2 * BLOCK, **options)
        self.calls: list[str] = []
        self.watch = None

    def publish(self, version, deadline):
        self.calls.append("publish")
        super().publish(version, deadline)

    def sender(self, readers, deadline, watch):
        self.calls.append("sender")
        self.watch = watch
        return super().sender(readers, deadline, watch)

    def settle(self):
        super().settle()
        self.calls.append("settle")


@pytest.fixture
def connect(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield connect


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "first": made(700),
        "empty": torch.empty(0, 3),
        "large": made(300, 50),
        "turned": made(40, 30).t(),
        "scalar": made(()),
        "half": made(9000).bfloat16(),
        "bytes": (made(5) * 9).to(torch.uint8),
        "last": made(12000),
    }


class Pair:
    """Two engines of one session, whose source announces what `values` makes."""

    def __init__(self, connect, transport_cls) -> None:
        self.loaders = [DictLoader(), DictLoader()]
        self.engines = [PausingEngine(transport_cls, loader) for loader in self.loaders]
        self.connect = connect
        self.sync = connect(self.engines, Announced(values(0)))
        self.trainer = self.sync._trainer

    def round(self, version, **options):
        self.sync.begin(version, **options)
        for chunk in chunks(values(version), 3):
            self.sync.send(chunk)
        return self.sync.end()

    def assert_has(self, version) -> None:
        for loader in self.loaders:
            assert_equal(loader.weights, values(version) if version else {})
        assert [engine.paused for engine in self.engines] == [False, False]
        expected = [EngineStatus(f"engine{n}", version, False) for n in range(2)]
        assert self.sync.status() == expected

    def assert_given_up(self) -> None:
        """Settled once, nothing left running, and a good round is possible."""
        assert self.trainer.calls.count("settle") == self.trainer.calls.count("publish")
        assert serving_threads() == 0
        self.assert_has(None)
        self.round(7)
        self.assert_has(7)


def chunks(weights, size):
    items = list(weights.items())
    return [items[first : first + size] for first in range(0, len(items), size)]


def serving_threads() -> int:
    return sum(thread.name == "vllm-wt-serve" for thread in threading.enumerate())


@pytest.fixture
def pair(connect, transport_cls):
    return Pair(connect, transport_cls)


def test_three_rounds_bring_what_three_pushes_bring(pair, connect, transport_cls):
    loader = DictLoader()
    source = dict(values(0))
    pushing = connect(PausingEngine(transport_cls, loader), source)
    for version in (1, 2, 3):
        source.update(values(version))
        result = pair.round(version)
        pushed = pushing.push(version)
        pair.assert_has(version)
        assert_equal(pair.loaders[0].weights, loader.weights)
        assert (result.version, result.nbytes, result.tensors) == (
            version,
            pushed.nbytes,
            pushed.tensors,
        )
        assert list(result.engines) == ["engine0", "engine1"]
    assert pair.trainer.calls == ["publish", "sender", "settle"] * 3
    assert pair.trainer._settled.count > 3 * len(pair.trainer._ring.slots)
    assert serving_threads() == 0


def test_the_phases_are_those_of_a_push(pair):
    seen = [[] for _ in pair.engines]
    for engine, calls in zip(pair.engines, seen, strict=True):
        engine.calls = calls
    pair.sync.begin(1)
    assert seen == [["start", "open"]] * 2
    pair.sync.send(values(1))
    pair.sync.end()
    for calls in seen:
        steps = [call for call in calls if call != "poll"]
        assert steps == ["start", "open", "seal", "pause", "finish", "confirm", "resume"]


def test_an_engine_is_paused_from_begin_to_end_without_overlap(pair):
    pair.sync.begin(1, overlap=False)
    assert [engine.paused for engine in pair.engines] == [True, True]
    pair.sync.send(values(1))
    assert [engine.paused for engine in pair.engines] == [True, True]
    pair.sync.end()
    pair.assert_has(1)


def test_what_was_sent_is_the_callers_again(pair):
    pair.sync.begin(1)
    for name, tensor in values(1).items():
        pair.sync.send([(name, tensor)])
        tensor.zero_()
    pair.sync.end()
    pair.assert_has(1)


@pytest.mark.parametrize("form", ["mapping", "generator", "one by one", "without empty", "halves"])
def test_what_can_be_sent(pair, form):
    weights = values(1)
    pair.sync.begin(1)
    if form == "mapping":
        pair.sync.send(weights)
    elif form == "generator":
        pair.sync.send((name, tensor.clone()) for name, tensor in weights.items())
    elif form == "one by one":
        pair.sync.send({})
        for name, tensor in weights.items():
            pair.sync.send({name: torch.nn.Parameter(tensor) if name == "large" else tensor})
        pair.sync.send([])
    elif form == "without empty":
        pair.sync.send({name: tensor for name, tensor in weights.items() if tensor.numel()})
    else:
        for chunk in chunks(weights, 4):
            pair.sync.send(iter(chunk))
    pair.sync.end()
    pair.assert_has(1)


def test_a_streamed_engine_is_paused_before_it_receives(connect, transport_cls, loader):
    engine = PausingEngine(transport_cls, loader, streams=True)
    sync = connect(engine, Announced(values(0)))
    sync.begin(1)
    assert engine.paused
    sync.send(values(1))
    sync.end()
    assert not engine.paused
    assert_equal(loader.weights, values(1))


def test_nothing_but_empty_tensors(connect, transport_cls, loader):
    sync = connect(
        PausingEngine(transport_cls, loader), Announced([("empty", torch.float32, (0, 3))])
    )
    for version, sent in ((1, {"empty": torch.empty(0, 3)}), (2, {})):
        sync.begin(version)
        sync.send(sent)
        sync.end()
        assert_equal(loader.weights, {"empty": torch.empty(0, 3)})


# -- what is refused ---------------------------------------------------------------------------------


def wrong(kind):
    """What the second send is given, and what the error says of it."""
    weights = values(1)
    if kind == "order":
        return [("scalar", weights["scalar"])], "turned float32 [30, 40]", "scalar float32 []"
    if kind == "twice":
        return [("large", weights["large"])], "turned float32 [30, 40]", "large float32 [300, 50]"
    if kind == "name":
        return {"odd": torch.ones(2)}, "turned float32 [30, 40]", "odd float32 [2]"
    if kind == "empty":
        return {"odd": torch.ones(0)}, "turned float32 [30, 40]", "odd float32 [0]"
    if kind == "shape":
        turned = weights["turned"].t()
        return {"turned": turned}, "turned float32 [30, 40]", "turned float32 [40, 30]"
    if kind == "dtype":
        turned = weights["turned"].half()
        return {"turned": turned}, "turned float32 [30, 40]", "turned float16 [30, 40]"
    rest = dict(list(weights.items())[3:])
    return [*rest.items(), ("last", rest["last"])], "no more", "last float32 [12000]"


@pytest.mark.parametrize("kind", ["order", "twice", "name", "empty", "shape", "dtype", "too many"])
def test_a_tensor_out_of_turn(pair, kind):
    sent, expected, got = wrong(kind)
    pair.sync.begin(1)
    pair.sync.send(list(values(1).items())[:3])
    with pytest.raises(ManifestMismatch, match="differ from the manifest") as error:
        pair.sync.send(sent)
    assert (error.value.expected, error.value.got) == (expected, got)
    assert error.value.where == "send"
    assert "manifest's order" in error.value.cure
    pair.assert_given_up()


def test_one_is_missing_at_the_end(pair):
    pair.sync.begin(1)
    pair.sync.send(list(values(1).items())[:-1])
    with pytest.raises(ManifestMismatch, match="differ from the manifest") as error:
        pair.sync.end()
    assert error.value.expected == "last float32 [12000]"
    pair.assert_given_up()


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (3, "cannot be sent"),
        ("first", "cannot be sent"),
        (torch.ones(2), "cannot be sent"),
        ([torch.ones(2)], "not a name and a tensor"),
        ([("first",)], "not a name and a tensor"),
        ({3: torch.ones(2)}, "not a name"),
        ({"first": [1.0]}, "not a tensor"),
        ({"first": torch.ones(700, device="meta")}, "never materialised"),
        ({"first": torch.ones(700).to_sparse()}, "not a dense tensor"),
    ],
)
def test_what_cannot_be_sent(pair, sent, what):
    pair.sync.begin(1)
    with pytest.raises(InvalidInfo, match=what) as error:
        pair.sync.send(sent)
    assert error.value.where == "send"
    assert error.value.cure
    pair.assert_given_up()


def test_memory_that_was_freed_is_not_looked_at(pair):
    tensor = values(1)["first"]
    tensor.untyped_storage().resize_(0)
    pair.sync.begin(1)
    with pytest.raises(ManifestMismatch, match="freed or resized"):
        pair.sync.send({"first": tensor})
    pair.assert_given_up()


def test_an_error_of_the_callers_own_in_a_send(pair):
    def made():
        yield from list(values(1).items())[:2]
        raise ZeroDivisionError("odd")

    pair.sync.begin(1)
    with pytest.raises(TransportError, match="ZeroDivisionError: odd") as error:
        pair.sync.send(made())
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    pair.assert_given_up()


def test_an_interrupt_in_a_send(pair):
    def made():
        raise KeyboardInterrupt
        yield

    pair.sync.begin(1)
    with pytest.raises(KeyboardInterrupt):
        pair.sync.send(made())
    pair.assert_given_up()


def test_an_interrupt_between_two_steps_ends_the_round(pair, monkeypatch):
    """The tensors are sent, and the session has not heard of it yet."""
    put = Delivery.put

    def interrupted(self, weights):
        put(self, weights)
        raise KeyboardInterrupt

    pair.sync.begin(1)
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.sync.send({})
    pair.assert_given_up()


def test_push_on_what_was_only_announced(pair):
    with pytest.raises(InvalidInfo, match="only announces") as error:
        pair.sync.push(1)
    assert "begin, send and end" in error.value.cure
    assert pair.trainer.calls == []
    pair.round(1)
    pair.assert_has(1)


def test_begin_on_a_source_with_values(connect, transport_cls, loader):
    sync = connect(PausingEngine(transport_cls, loader), {"a": torch.ones(3)})
    with pytest.raises(InvalidInfo, match="has values of its own") as error:
        sync.begin(1)
    assert "push" in error.value.cure
    assert "Announced" in error.value.cure
    sync.push(1)
    assert_equal(loader.weights, {"a": torch.ones(3)})


def test_a_backend_that_takes_no_chunks(pair, monkeypatch):
    monkeypatch.setattr(Trainer, "sender", TrainerWeightTransferEngine.sender)
    with pytest.raises(InvalidInfo, match="does not take weights chunk by chunk") as error:
        pair.sync.begin(1)
    assert error.value.where == "begin"
    monkeypatch.undo()
    pair.assert_has(None)


@pytest.mark.parametrize("call", ["send", "end"])
def test_without_a_round(pair, call):
    for _ in range(2):
        with pytest.raises(WrongOrder, match=f"{call} without a round") as error:
            getattr(pair.sync, call)(*[{}] * (call == "send"))
        assert "begin()" in error.value.cure
        pair.sync.begin(1)
        with pytest.raises(ManifestMismatch):
            pair.sync.end()
    pair.sync.close()
    with pytest.raises(WrongOrder, match="without a round") as error:
        pair.sync.end()
    assert error.value.cure == "connect again"
    with pytest.raises(WrongOrder, match="begin after close"):
        pair.sync.begin(1)


@pytest.mark.parametrize("call", ["begin", "push", "status"])
def test_other_calls_leave_an_open_round_as_it_is(pair, call):
    pair.sync.begin(1)
    pair.sync.send(chunks(values(1), 3)[0])
    with pytest.raises(WrongOrder, match=f"{call} while a round is open") as error:
        getattr(pair.sync, call)(*[2] * (call != "status"))
    assert "version 1" in error.value.got
    for chunk in chunks(values(1), 3)[1:]:
        pair.sync.send(chunk)
    pair.sync.end()
    pair.assert_has(1)


def test_a_call_within_a_send(pair):
    def made():
        with pytest.raises(WrongOrder, match="close while another call"):
            pair.sync.close()
        yield from values(1).items()

    pair.sync.begin(1)
    pair.sync.send(made())
    pair.sync.end()
    pair.assert_has(1)


def test_a_version_that_does_not_advance(pair):
    pair.round(3)
    pair.trainer.calls.clear()
    with pytest.raises(InvalidInfo, match="does not advance"):
        pair.sync.begin(3)
    assert pair.trainer.calls == []
    pair.round(4)
    pair.assert_has(4)


# -- rounds that are given up ------------------------------------------------------------------------


def test_abort(pair):
    pair.sync.abort()
    pair.sync.begin(1)
    pair.sync.send(chunks(values(1), 3)[0])
    pair.sync.abort()
    pair.sync.abort()
    with pytest.raises(WrongOrder, match="send without a round"):
        pair.sync.send(chunks(values(1), 3)[1])
    pair.assert_given_up()


def test_close_gives_an_open_round_up(pair, monkeypatch):
    told = []
    monkeypatch.setattr(session, "tell", lambda hook, **facts: told.append((hook, facts)))
    pair.sync.begin(1, overlap=False)
    pair.sync.send(chunks(values(1), 3)[0])
    thread = threading.Thread(target=pair.sync.close)
    thread.start()
    thread.join()
    assert serving_threads() == 0
    assert pair.trainer.calls == ["publish", "sender", "settle"]
    assert [engine.paused for engine in pair.engines] == [False, False]
    assert [engine.round.state.value for engine in pair.engines] == ["idle", "idle"]
    assert [hook for hook, _ in told] == ["vllm_wt_round_started", "vllm_wt_round_failed"]
    assert isinstance(told[1][1]["error"], Aborted)
    other = pair.connect(pair.engines, values(2))
    other.push(1)
    assert_equal(pair.loaders[1].weights, values(2))


def test_an_engine_that_does_not_begin(pair):
    pair.engines[1].fails["start"] = PeerDead("gone")
    with pytest.raises(PeerDead, match="gone") as error:
        pair.sync.begin(1)
    assert error.value.engine == "engine1"
    pair.assert_given_up()


def test_an_engine_that_fails_while_the_trainer_makes_the_next_chunk(pair, monkeypatch):
    """It is asked within a send, whether that waits or not, and heard in it or in a later one."""
    monkeypatch.setattr("vllm_wt.polling._FIRST_S", 0.0)
    pair.sync.begin(1)
    pair.engines[1].fails["poll"] = PeerDead("gone")
    with pytest.raises(PeerDead, match="gone"):
        _send_nothing(pair.sync, Deadline(30))
    pair.assert_given_up()


def _send_nothing(sync, until):
    while not until.expired:
        sync.send({})


def test_a_serving_thread_that_fails_between_two_sends(pair, monkeypatch):
    def serve(self, stop):
        raise ZeroDivisionError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "serve", serve)
        pair.sync.begin(1)
        pair.sync._round.delivery._serving._thread.join()
        with pytest.raises(TransportError, match="The trainer's side failed: odd"):
            pair.sync.send({})
    pair.assert_given_up()


def test_a_serving_thread_that_fails_within_a_send_is_named_as_the_cause(pair, monkeypatch):
    fail = threading.Event()

    def serve(self, stop):
        fail.wait()
        raise ZeroDivisionError("odd")

    def made():
        fail.set()
        pair.sync._round.delivery._serving._thread.join()
        yield "odd", torch.ones(3)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "serve", serve)
        pair.sync.begin(1)
        with pytest.raises(TransportError, match="The trainer's side failed: odd") as error:
            pair.sync.send(made())
        assert isinstance(error.value.__cause__, ManifestMismatch)
    pair.assert_given_up()


def test_a_reader_that_stalls(pair, fabric):
    fabric.hold = True
    pair.sync.begin(1, deadline_s=0.3)
    with pytest.raises(Timeout):
        pair.sync.send(values(1))
    fabric.hold = False
    pair.assert_given_up()


def test_a_trainer_that_comes_too_late(pair):
    """Its tensors would find room in the ring, but nobody waits for them any more."""
    pair.sync.begin(1, deadline_s=0.05)
    deadline = pair.sync._round.delivery._deadline
    threading.Event().wait(deadline.remaining())
    with pytest.raises(Timeout):
        pair.sync.send(chunks(values(1), 1)[0])
    pair.assert_given_up()


def test_a_commit_that_fails_on_one_engine(pair):
    pair.loaders[0].fail = ZeroDivisionError("odd")
    pair.sync.begin(1)
    pair.sync.send(values(1))
    with pytest.raises(WeightTransferError) as error:
        pair.sync.end()
    assert "still paused" in error.value.cure
    assert_equal(pair.loaders[1].weights, values(1))
    assert [status.torn for status in pair.sync.status()] == [True, False]
    pair.loaders[0].fail = None
    pair.round(2)
    pair.assert_has(2)


def test_observers(pair, monkeypatch):
    told = []
    monkeypatch.setattr(session, "tell", lambda hook, **facts: told.append((hook, facts)))
    result = pair.round(1)
    pair.sync.begin(2)
    with pytest.raises(ManifestMismatch) as error:
        pair.sync.end()
    assert told == [
        ("vllm_wt_round_started", {"version": 1}),
        ("vllm_wt_round_finished", {"stats": result}),
        ("vllm_wt_round_started", {"version": 2}),
        ("vllm_wt_round_failed", {"version": 2, "error": error.value}),
    ]
