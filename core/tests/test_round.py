"""The worker's state machine: what each failure leaves behind, on one rank and on two."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from vllm_wt.engine import WeightTransferEngine, WorkerContext
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    LoadError,
    ManifestMismatch,
    Superseded,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.info import InitInfo, UpdateInfo
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.ranks import Report, SingleRank
from vllm_wt.round import State, WorkerRound

MANIFEST = Manifest((TensorMeta("a", "float32", (2,)), TensorMeta("b", "float32", (3,))))
WEIGHTS = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}


class StubEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives what it is told to, when it is told to."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(
            WorkerContext(backend="stub", device=torch.device("cpu"), rank=rank, size=size)
        )
        self.weights: dict[str, torch.Tensor] = dict(WEIGHTS)
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        self.aborted = threading.Event()
        self.calls: list[str] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.calls.append("init")
        if self.error is not None:
            raise self.error

    def start_weight_update(self) -> None:
        self.aborted.clear()

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any) -> None:
        while not self.go.wait(0.001):
            if self.aborted.is_set():
                raise Aborted("given up")
        if self.error is not None:
            raise self.error
        load_weights(self.weights.items())

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def abort_weight_update(self, reason: str) -> None:
        self.calls.append(f"abort: {reason}")
        self.aborted.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def init_info(session: str = "s1", **changes: Any) -> dict[str, Any]:
    info = InitInfo(
        session=session,
        tensors=InitInfo.tensors_of(MANIFEST),
        manifest_digest=MANIFEST.digest,
    )
    return info.to_wire() | changes


def update_info(op: str, version: int = 1, **changes: Any) -> dict[str, Any]:
    wire = {
        "op": op,
        "session": "s1",
        "version": version,
        "ticket": version,
        "manifest_digest": MANIFEST.digest,
        "deadline_s": 30.0,
    }
    return wire | changes


@pytest.fixture
def engine():
    return StubEngine()


@pytest.fixture
def worker(engine, loader):
    return WorkerRound(engine, loader, SingleRank())


def connected(worker: WorkerRound) -> WorkerRound:
    worker.init(init_info())
    return worker


def commit(worker: WorkerRound, version: int) -> None:
    worker.start()
    worker.update(update_info("open", version))
    worker.update(update_info("poll", version))
    worker.update(update_info("seal", version))
    worker.finish()


def assert_loaded(loader) -> None:
    assert {n: t.tolist() for n, t in loader.weights.items()} == {
        n: t.tolist() for n, t in WEIGHTS.items()
    }


def test_a_round_loads_nothing_before_finish(worker, engine, loader):
    connected(worker)
    assert loader.rehearsed == MANIFEST
    worker.start()
    assert worker.state is State.STARTED
    worker.update(update_info("open"))
    assert worker.state is State.RECEIVING
    worker.update(update_info("seal"))
    assert worker.state is State.SEALED
    assert loader.weights == {}
    assert worker.version is None
    worker.finish()
    assert worker.state is State.IDLE
    assert worker.version == 1
    assert engine.calls == ["init", "finish"]
    assert_loaded(loader)


def test_all_in_one_call(worker, loader):
    connected(worker).start()
    worker.update(update_info("all"))
    worker.finish()
    assert_loaded(loader)


def test_two_updates_in_one_round_are_refused(worker, loader):
    connected(worker).start()
    worker.update(update_info("all"))
    with pytest.raises(WrongOrder, match="'sealed'"):
        worker.update(update_info("all", 2))
    with pytest.raises(WrongOrder, match="finish in state 'idle'"):
        worker.finish()
    assert loader.weights == {}


def test_finish_before_the_seal_leaves_the_weights(worker, engine, loader):
    engine.go.clear()
    connected(worker).start()
    worker.update(update_info("open"))
    with pytest.raises(Aborted, match="closed before it was sealed") as error:
        worker.finish()
    assert error.value.got == "state 'receiving'"
    assert any(call.startswith("abort") for call in engine.calls)
    assert worker.state is State.IDLE
    assert loader.weights == {}
    engine.go.set()
    commit(worker, 2)
    assert_loaded(loader)


def test_a_second_start_is_refused_and_the_round_goes_on(worker, loader):
    connected(worker).start()
    with pytest.raises(WrongOrder, match="start a round in state 'started'") as error:
        worker.start()
    assert "a finish, an abort or a new init ends a round" in error.value.cure
    worker.update(update_info("open"))
    with pytest.raises(WrongOrder, match="start a round in state 'receiving'"):
        worker.start()
    worker.update(update_info("seal"))
    worker.finish()
    assert_loaded(loader)


@pytest.mark.parametrize("opened", [True, False], ids=["receiving", "started"])
def test_abort_ends_a_round_and_the_next_one_starts(worker, engine, loader, opened):
    engine.go.clear()
    connected(worker).start()
    if opened:
        worker.update(update_info("open"))
    worker.update(update_info("abort"))
    assert engine.aborted.is_set() == opened
    assert worker.state is State.IDLE
    engine.go.set()
    commit(worker, 2)
    assert_loaded(loader)


def test_abort_of_a_sealed_round_commits_nothing(worker, loader):
    connected(worker).start()
    worker.update(update_info("all"))
    worker.update(update_info("abort"))
    with pytest.raises(WrongOrder, match="finish in state 'idle'"):
        worker.finish()
    assert loader.weights == {}


@pytest.mark.parametrize("op", ["open", "poll", "seal", "all", "abort", "confirm"])
def test_a_call_of_a_trainer_that_was_replaced_changes_nothing(worker, loader, op):
    connected(worker)
    worker.init(init_info("s2"))
    worker.start()
    worker.update(update_info("open", session="s2"))
    with pytest.raises(Superseded, match="Another trainer has connected") as error:
        worker.update(update_info(op))
    assert (error.value.expected, error.value.got) == ("s2", "s1")
    worker.update(update_info("seal", session="s2"))
    worker.finish()
    assert_loaded(loader)


def test_confirm_tells_a_commit_from_none(worker, loader):
    connected(worker)
    worker.update(update_info("confirm", 0))
    with pytest.raises(Aborted, match="has not been committed") as error:
        worker.update(update_info("confirm", 1))
    assert (error.value.expected, error.value.got) == ("version 1", "version None")
    commit(worker, 1)
    worker.update(update_info("confirm", 1))
    with pytest.raises(Aborted):
        worker.update(update_info("confirm", 1, ticket=2))
    worker.init(init_info("s2"))
    worker.update(update_info("confirm", 0, session="s2"))


def test_a_refused_trainer_leaves_the_one_that_is_connected(worker, engine, loader):
    connected(worker).start()
    worker.update(update_info("open"))
    with pytest.raises(InvalidInfo):
        worker.init(init_info("s2", protocol=9))
    with pytest.raises(CorruptTransfer):
        worker.init(init_info("s2", manifest_digest="0" * 64))
    loader.rehearse = lambda manifest: (_ for _ in ()).throw(LoadError("no such parameter"))
    with pytest.raises(LoadError):
        worker.init(init_info("s2"))
    worker.update(update_info("seal"))
    worker.finish()
    assert_loaded(loader)


def test_a_call_that_the_engine_has_no_part_in(worker):
    connected(worker).start()
    with pytest.raises(WrongOrder, match="start_draft_weight_update is not possible") as error:
        worker.refuse("start_draft_weight_update", "leave it out")
    assert error.value.cure == "leave it out"
    assert worker.state is State.STARTED


@pytest.mark.parametrize("op", ["poll", "seal"])
def test_error_of_the_receiving_thread_comes_out_typed(worker, engine, op):
    connected(worker).start()
    engine.error = ZeroDivisionError("odd")
    worker.update(update_info("open"))
    worker._receive.join(10)
    with pytest.raises(TransportError, match="ZeroDivisionError: odd") as error:
        worker.update(update_info(op))
    assert error.value.backend == "stub"
    assert worker.state is State.IDLE
    engine.error = None
    commit(worker, 2)


def test_poll_while_receiving_and_after(worker, engine):
    engine.go.clear()
    connected(worker).start()
    worker.update(update_info("open"))
    worker.update(update_info("poll"))
    engine.go.set()
    worker._receive.join(10)
    worker.update(update_info("poll"))
    worker.update(update_info("seal"))


@pytest.mark.parametrize("op", ["poll", "seal"])
def test_deadline_of_a_receive_that_stalls(worker, engine, loader, op):
    engine.go.clear()
    connected(worker).start()
    worker.update(update_info("open", deadline_s=0.05))
    worker._receive.join(0.1)
    with pytest.raises(Timeout, match="not complete") as error:
        worker.update(update_info(op))
    assert error.value.expected == "within 0.05 s"
    assert engine.aborted.is_set()
    engine.go.set()
    commit(worker, 2)
    assert_loaded(loader)


@pytest.mark.parametrize(
    ("weights", "error_cls", "message"),
    [
        ({"a": WEIGHTS["a"]}, CorruptTransfer, "first missing ['b']"),
        ({}, CorruptTransfer, "0 tensors, 0 bytes"),
        (WEIGHTS | {"c": torch.ones(1)}, ManifestMismatch, "'c', which was not announced"),
        (WEIGHTS | {"a": torch.ones(3)}, ManifestMismatch, "float32 [3]"),
        (WEIGHTS | {"a": torch.ones(2, dtype=torch.float64)}, ManifestMismatch, "float64 [2]"),
    ],
    ids=["short", "nothing", "extra", "shape", "dtype"],
)
def test_what_arrives_must_be_what_was_announced(
    worker, engine, loader, weights, error_cls, message
):
    engine.weights = weights
    connected(worker).start()
    with pytest.raises(error_cls) as error:
        worker.update(update_info("all"))
    assert message in str(error.value)
    assert worker.state is State.IDLE
    assert loader.weights == {}


def test_a_tensor_that_arrives_twice(worker, engine, loader):
    def receive(update_info, load_weights):
        load_weights(WEIGHTS.items())
        load_weights([("a", WEIGHTS["a"])])

    engine.receive_weights = receive
    connected(worker).start()
    with pytest.raises(ManifestMismatch, match="'a', which was received already"):
        worker.update(update_info("all"))


def test_a_failing_commit_is_torn_until_a_full_one(worker, loader):
    connected(worker).start()
    worker.update(update_info("all"))
    loader.fail = ValueError("bad layer")
    with pytest.raises(TornModel, match="ValueError: bad layer"):
        worker.finish()
    assert worker.torn
    assert worker.version is None
    with pytest.raises(TornModel, match="mix of old and new"):
        worker.update(update_info("confirm", 0))
    loader.fail = None
    with pytest.raises(WrongOrder):
        worker.finish()
    assert worker.torn
    worker.init(init_info())
    assert worker.torn
    commit(worker, 2)
    assert not worker.torn
    worker.update(update_info("confirm", 2))


@pytest.mark.parametrize(
    ("changes", "error_cls", "message"),
    [
        ({"manifest_digest": "0" * 64}, ManifestMismatch, "not what was agreed on"),
        ({"version": 0}, InvalidInfo, "more than 1"),
        ({"version": 1}, InvalidInfo, "more than 1"),
        ({"op": "nonsense"}, InvalidInfo, "'op'"),
    ],
)
def test_wrong_update_info(worker, loader, changes, error_cls, message):
    commit(connected(worker), 1)
    loader.weights = {}
    worker.start()
    with pytest.raises(error_cls) as error:
        worker.update(update_info("open", 2) | changes)
    assert message in str(error.value)
    assert error.value.where in {"version", "manifest_digest", "op"}
    assert error.value.cure
    assert loader.weights == {}
    commit(worker, 2)


def test_seal_of_another_ticket(worker):
    connected(worker).start()
    worker.update(update_info("open"))
    with pytest.raises(InvalidInfo, match="seal of another attempt"):
        worker.update(update_info("seal", ticket=9))


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_update_that_is_no_mapping(worker, data):
    connected(worker).start()
    with pytest.raises(InvalidInfo, match="must be a mapping"):
        worker.update(data)


@pytest.mark.parametrize(
    ("call", "args"), [("start", ()), ("update", (update_info("open"),)), ("finish", ())]
)
def test_a_round_before_init(worker, call, args):
    with pytest.raises(WrongOrder, match="before init") as error:
        getattr(worker, call)(*args)
    assert "connect first" in error.value.cure


def test_seal_before_open(worker):
    connected(worker).start()
    with pytest.raises(WrongOrder, match="'started'"):
        worker.update(update_info("seal"))


def test_a_failed_init_disconnects(worker, engine, loader):
    connected(worker)
    engine.error = OSError("unreachable")
    with pytest.raises(TransportError, match="unreachable"):
        worker.init(init_info("s2"))
    with pytest.raises(WrongOrder, match="before init"):
        worker.start()


def test_an_engine_that_cannot_start(worker, engine, loader):
    def start():
        raise OSError("no buffers")

    connected(worker)
    engine.start_weight_update = start
    with pytest.raises(TransportError, match="OSError: no buffers") as error:
        worker.start()
    assert error.value.where == "start_weight_update"
    del engine.start_weight_update
    commit(worker, 2)
    assert_loaded(loader)


def test_an_engine_that_fails_after_the_commit_or_at_shutdown_is_logged(
    worker, engine, loader, caplog
):
    def broken():
        raise OSError("odd")

    connected(worker)
    engine.finish_weight_update = engine.shutdown = broken
    commit(worker, 1)
    assert_loaded(loader)
    assert worker.version == 1
    assert "did not finish cleanly" in caplog.text
    worker.shutdown()
    assert "did not shut down cleanly" in caplog.text


def test_init_refuses_what_the_model_does_not_take(worker, engine, loader):
    def rehearse(manifest):
        raise LoadError("no such parameter")

    loader.rehearse = rehearse
    with pytest.raises(LoadError, match="no such parameter"):
        worker.init(init_info())
    assert engine.calls == []


def test_a_new_trainer_replaces_the_first(worker, loader):
    commit(connected(worker), 5)
    worker.init(init_info("s2"))
    worker.start()
    worker.update(update_info("all", 1, session="s2"))
    worker.finish()
    assert worker.version == 1


def test_no_trainer_connects_while_an_earlier_ones_receive_lives(
    worker, engine, loader, monkeypatch
):
    """It would read its own trainer's weights into the new one's round."""
    monkeypatch.setattr("vllm_wt.round.ABORT_S", 0.01)
    frozen, receive = threading.Event(), engine.receive_weights

    def stuck(update_info, load_weights):
        frozen.wait(10)

    engine.receive_weights = stuck
    connected(worker).start()
    worker.update(update_info("open"))
    thread = worker._receive
    with pytest.raises(Aborted):
        worker.finish()
    with pytest.raises(TransportError, match="not come to its end"):
        worker.init(init_info("s2"))
    assert engine.calls.count("init") == 1
    worker.shutdown()
    assert "shutdown" not in engine.calls
    frozen.set()
    thread.join(10)
    engine.receive_weights = receive
    commit(connected(worker), 1)
    assert_loaded(loader)


def test_a_new_trainer_ends_a_round_that_was_left_open(worker, engine, loader):
    engine.go.clear()
    connected(worker).start()
    worker.update(update_info("open"))
    worker.init(init_info("s2"))
    assert engine.aborted.is_set()
    assert worker.state is State.IDLE
    engine.go.set()
    worker.start()
    worker.update(update_info("all", session="s2"))
    worker.finish()
    assert_loaded(loader)


def test_connecting_after_a_seal_commits_nothing(worker, loader):
    connected(worker).start()
    worker.update(update_info("all"))
    worker.init(init_info("s2"))
    with pytest.raises(WrongOrder):
        worker.finish()
    assert loader.weights == {}
    assert worker.version is None


def test_shutdown_twice_then_init(worker, engine):
    connected(worker)
    worker.shutdown()
    worker.shutdown()
    commit(connected(worker), 1)


# -- two ranks ---------------------------------------------------------------------------------


class _Pair:
    """Reports of two ranks meet at a barrier."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.reports: list[Report | None] = [None, None]


class _PairedRank:
    size = 2

    def __init__(self, rank: int, pair: _Pair) -> None:
        self.rank = rank
        self._pair = pair

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        self._pair.reports[self.rank] = Report.decode(report.encode())
        self._pair.barrier.wait(10)
        reports = list(self._pair.reports)
        self._pair.barrier.wait(10)
        return reports


class TwoWorkers:
    """Two ranks that are called at once, as vLLM does."""

    def __init__(self, loader_cls) -> None:
        pair = _Pair()
        self.engines = [StubEngine(rank, 2) for rank in range(2)]
        self.loaders = [loader_cls() for _ in range(2)]
        self.rounds = [
            WorkerRound(self.engines[rank], self.loaders[rank], _PairedRank(rank, pair))
            for rank in range(2)
        ]

    def call(self, method: str, *args: Any) -> WeightTransferError | None:
        """The error of the highest rank; no other may have one."""
        errors: list[Exception | None] = [None, None]

        def run(rank: int) -> None:
            try:
                getattr(self.rounds[rank], method)(*args)
            except Exception as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert errors[0] is None, f"rank 0 raised, which puts vLLM out of step: {errors[0]!r}"
        assert self.rounds[0].state is self.rounds[1].state
        return errors[1]


@pytest.fixture
def pair(loader):
    return TwoWorkers(type(loader))


def _sync(pair: TwoWorkers, version: int) -> None:
    for method, args in [
        ("start", ()),
        ("update", (update_info("all", version),)),
        ("finish", ()),
    ]:
        assert pair.call(method, *args) is None
    for loader in pair.loaders:
        assert_loaded(loader)
    assert [round_.version for round_ in pair.rounds] == [version, version]


@pytest.mark.parametrize("rank", [0, 1])
def test_failing_update_on_one_rank_raises_on_the_highest_and_loads_nowhere(pair, rank):
    assert pair.call("init", init_info()) is None
    pair.engines[rank].error = OSError("cable")
    for version in range(1, 11):
        pair.call("start")
        error = pair.call("update", update_info("all", version))
        assert isinstance(error, TransportError)
        assert error.ranks == {rank: "OSError: cable"}
        assert isinstance(pair.call("finish"), WrongOrder)
        assert [loader.weights for loader in pair.loaders] == [{}, {}]
    pair.engines[rank].error = None
    _sync(pair, 11)


@pytest.mark.parametrize("rank", [0, 1])
def test_failing_commit_on_one_rank_is_torn_on_both(pair, rank):
    assert pair.call("init", init_info()) is None
    pair.call("start")
    pair.call("update", update_info("all"))
    pair.loaders[rank].fail = ValueError("layer")
    error = pair.call("finish")
    assert isinstance(error, TornModel)
    assert list(error.ranks) == [rank]
    assert [round_.torn for round_ in pair.rounds] == [True, True]
    pair.loaders[rank].fail = None
    _sync(pair, 2)
    assert [round_.torn for round_ in pair.rounds] == [False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_failing_init_on_one_rank_disconnects_both(pair, rank):
    pair.engines[rank].error = OSError("unreachable")
    error = pair.call("init", init_info())
    assert error.ranks == {rank: "OSError: unreachable"}
    assert [round_._session for round_ in pair.rounds] == [None, None]
    pair.engines[rank].error = None
    error = pair.call("start")
    assert isinstance(error, WrongOrder)
    assert list(error.ranks) == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_fails_on_one_rank_starts_on_none(pair, rank):
    def start():
        raise OSError("no buffers")

    pair.call("init", init_info())
    pair.engines[rank].start_weight_update = start
    error = pair.call("start")
    assert error.ranks == {rank: "OSError: no buffers"}
    del pair.engines[rank].start_weight_update
    _sync(pair, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_one_rank_refuses_does_not_replace_the_first(pair, rank):
    def rehearse(manifest):
        raise LoadError("no such parameter")

    pair.call("init", init_info())
    pair.loaders[rank].rehearse = rehearse
    error = pair.call("init", init_info("s2"))
    assert isinstance(error, LoadError)
    assert error.ranks == {rank: "no such parameter"}
    _sync(pair, 1)


@pytest.mark.parametrize("order", [("start", "start"), ("finish",), ("start", "finish", "finish")])
def test_a_wrong_order_is_refused_by_the_highest_rank(pair, order):
    pair.call("init", init_info())
    *before, last = order
    for method in before:
        pair.call(method)
    error = pair.call(last)
    assert isinstance(error, WrongOrder)
    assert list(error.ranks) == [0, 1]
    pair.call("update", update_info("abort"))
    _sync(pair, 3)


class _MissesAVote:
    """A rank whose peer is not heard at one exchange, after which it is heard of that one."""

    size = 2

    def __init__(self, miss: int, rank: int = 1) -> None:
        self._left = miss
        self.rank = rank

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        self._left -= 1
        if self._left == 0:
            raise Timeout("The ranks of the engine could not agree")
        return [report, report]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("op", ["open", "seal"])
def test_a_vote_that_was_not_heard_ends_the_round(loader, op, rank):
    """The highest rank says so; of another one it would be an answer too many."""
    votes = _MissesAVote({"open": 4, "seal": 5}[op], rank)
    worker = WorkerRound(StubEngine(rank, 2), loader, votes)
    connected(worker).start()
    if op == "seal":
        worker.update(update_info("open"))
    with pytest.raises(Timeout, match="could not agree") if rank else nullcontext():
        worker.update(update_info(op))
    assert not worker.has_agreed
    assert worker.state is State.IDLE
    assert loader.weights == {}
    assert worker.version is None


def test_no_commit_where_the_others_do_not_confirm_the_seal(loader):
    worker = WorkerRound(StubEngine(1, 2), loader, _MissesAVote(6))
    connected(worker).start()
    worker.update(update_info("open"))
    worker.update(update_info("seal"))
    with pytest.raises(Timeout, match="could not agree"):
        worker.finish()
    assert loader.weights == {}
    assert not worker.torn


def test_a_report_on_another_step_is_not_taken_for_this_ones(loader):
    class Late:
        rank, size = 1, 2

        def exchange(self, report, seconds):
            return [Report(None, "0 update_weights"), report]

    worker = WorkerRound(StubEngine(1, 2), loader, Late())
    with pytest.raises(TransportError, match="out of step") as error:
        worker.init(init_info())
    assert (error.value.expected, error.value.got) == (
        "1 init_weight_transfer_engine",
        "0 update_weights",
    )
