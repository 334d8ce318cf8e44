"""A round that is one call to the engine: when it is used, what it says, what its failures leave."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
import types
from contextlib import contextmanager

import pytest
import torch

from vllm_wt import bridge, methods, registry
from vllm_wt.bridge import gate
from vllm_wt.clients.local import LocalClient
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    EngineError,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    WeightTransferError,
    WrongOrder,
    from_text,
)
from vllm_wt.ranks import Report
from vllm_wt.results import EngineStatus
from vllm_wt.round import State, WorkerRound
from vllm_wt.source import StateDictSource

from .conftest import DictLoader
from .support.engines import (
    PausingEngine,
    RoundEngine,
    assert_equal,
    connecting,
)
from .test_round import StubEngine, assert_loaded, init_info, update_info

PHASES = ["start", "open", "seal", "finish", "confirm"]


@pytest.fixture
def connect(monkeypatch, mapping_cls):
    with connecting(monkeypatch, mapping_cls) as connect:
        yield connect


@pytest.fixture
def make_engine(mapping_cls):
    """``make_engine(cls, loader)``; they are shut down at the end."""
    engines = []

    def make(cls, loader):
        engines.append(cls(mapping_cls, loader))
        return engines[-1]

    yield make
    for engine in engines:
        engine.engine.shutdown()


@pytest.fixture
def engine(make_engine, loader):
    return make_engine(RoundEngine, loader)


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


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_round_is_one_call(sync, engine, loader, source, overlap):
    for version in (2, 3):
        source["b"].mul_(2)
        engine.calls.clear()
        result = sync.push(version, overlap=overlap)
        assert engine.calls == ["round"]
        assert_equal(loader.weights, source)
        assert result.version == version
    assert engine.versions == ["1", "2", "3"]
    (link,) = sync._members.links
    assert (link.version, link.torn, link.whole) == (3, False, True)
    assert sync.status() == [EngineStatus("engine0", 3, False)]


def test_what_the_engine_is_given(sync, engine):
    given = []
    run_round = engine.run_round

    def noting(info, version):
        given.append((info, version))
        return run_round(info, version)

    engine.run_round = noting
    sync.push(2)
    ((info, version),) = given
    assert (info["op"], info["version"], info["paused"], version) == ("all", 2, True, "2")
    assert info["handle"] is None


def test_memory_that_has_moved_is_told_until_a_round_has_come_through(sync, engine, loader, source):
    handles = []
    run_round = engine.run_round

    def noting(info, version):
        handles.append(info["handle"] is not None)
        return run_round(info, version)

    engine.run_round = noting
    source["a"] = torch.full((12,), 6.0)
    engine.fails["round"] = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom"):
        sync.push(2)
    sync.push(2)
    sync.push(3)
    assert handles == [True, True, False]
    assert_equal(loader.weights, source)


def test_an_engine_that_cannot_after_all_gets_the_phases(sync, engine, loader, source):
    engine.run_round = lambda info, version: engine.calls.append("asked")
    stages = sync.push(2).engines["engine0"]
    assert engine.calls == ["asked", *PHASES]
    assert stages.wire > 0
    assert stages.confirm > 0
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


@pytest.mark.parametrize("idle", [False, None, "yes"])
def test_not_for_an_engine_that_may_generate_meanwhile(
    connect, engine, loader, source, idle, monkeypatch
):
    monkeypatch.setattr(RoundEngine, "idle_between_calls", idle)
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1)
    assert engine.calls == PHASES
    assert_equal(loader.weights, source)


def test_not_for_an_engine_without_the_method(connect, engine, source):
    engine.run_round = None
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1)
    assert engine.calls == PHASES


def test_not_for_several_engines(connect, make_engine, source):
    loaders = [DictLoader(), DictLoader()]
    engines = [make_engine(RoundEngine, loader) for loader in loaders]
    sync = connect(engines, source)
    for engine in engines:
        engine.calls.clear()
    sync.push(1)
    assert [engine.calls for engine in engines] == [PHASES, PHASES]
    for loader in loaders:
        assert_equal(loader.weights, source)


def test_not_for_weights_that_have_to_be_made(connect, engine, loader, source):
    class Made(StateDictSource):
        made = frozenset(["a"])

    sync = connect(engine, Made(source))
    engine.calls.clear()
    sync.push(1)
    assert engine.calls == PHASES
    assert_equal(loader.weights, source)


def test_not_over_a_fabric_that_does_not_map(monkeypatch, transport_cls, loader, source):
    engine = RoundEngine(transport_cls, loader)
    with connecting(monkeypatch, transport_cls) as connect:
        sync = connect(engine, source)
        engine.calls.clear()
        sync.push(1)
    assert engine.calls == PHASES
    assert_equal(loader.weights, source)


class EitherEngine(PausingEngine):
    """One that can be paused, and takes a round in one call once it is."""

    def run_round(self, update_info, weight_version):
        assert self.paused
        self._call("round", self._whole, update_info)
        return [{}]

    _whole = RoundEngine._whole


def test_for_an_engine_that_is_paused_for_all_of_the_push(connect, make_engine, loader, source):
    engine = make_engine(EitherEngine, loader)
    sync = connect(engine, source)
    engine.calls.clear()
    sync.push(1, overlap=False)
    assert engine.calls == ["confirm", "pause", "round", "resume"]
    engine.calls.clear()
    sync.push(2)
    assert engine.calls == ["start", "open", "seal", "pause", "finish", "confirm", "resume"]
    assert_equal(loader.weights, source)


def test_a_round_that_was_opened_in_phases_is_ended_in_phases(connect, make_engine, loader, source):
    class Streaming(EitherEngine):
        def __init__(self, transport_cls, loader):
            super().__init__(transport_cls, loader)
            self.streams = True

    engine = make_engine(Streaming, loader)
    sync = connect(engine, source)
    for version in (1, 2):
        sync.push(version)
        assert_equal(loader.weights, source)
    assert not {"abort", "round"} & set(engine.calls)


# -- what it says ----------------------------------------------------------------------------------


def test_stages_are_those_of_the_slowest_worker(sync, engine):
    engine.told = [{"wire": 1e-7, "load": 5e-7}, {"wire": 3e-7, "load": 2e-7}, {"load": 1e-8}]
    stages = sync.push(2).engines["engine0"]
    assert (stages.wire, stages.load) == (3e-7, 5e-7)
    assert (stages.verify, stages.confirm, stages.stop, stages.resume) == (0, 0, 0, 0)
    assert stages.start > 0


_GARBAGE = [
    [],
    [None],
    [{}],
    [{"wire": "soon", "load": None}],
    [{"wire": math.nan, "load": math.inf}],
    [{"wire": -1.0, "load": 1e9}],
    [{"wire": True, "load": 1}],
    [{"wire": 10**400, "load": [1.0]}],
    [[1.0, 2.0]],
    [7],
    ["wire"],
    {},
    {"wire": 1.0},
    "text",
    "",
    7,
    True,
    1.5,
    object(),
]


@pytest.mark.parametrize("told", _GARBAGE, ids=lambda told: type(told).__name__)
def test_what_makes_no_sense_there_is_harmless(sync, engine, loader, source, told):
    engine.told = told
    stages = sync.push(2).engines["engine0"]
    assert all(0 <= seconds < 60 for seconds in (stages.wire, stages.load, stages.start))
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


def test_no_stage_takes_less_than_no_time(sync, engine):
    engine.told = [{"wire": 80000.0, "load": 0.0}]
    stages = sync.push(2).engines["engine0"]
    assert stages.start >= 0
    assert stages.wire < 60


@pytest.mark.parametrize("told", [[None], [], [{"wire": 0.1, "load": 0.1}, None], "text", 7])
def test_a_call_that_has_committed_nothing_is_no_success(sync, engine, loader, told):
    """Not every worker says that it has, so all of them are asked."""
    before = dict(loader.weights)
    engine.run_round = lambda info, version: told
    with pytest.raises(Aborted, match="has not been committed"):
        sync.push(2)
    assert_equal(loader.weights, before)
    assert sync.status() == [EngineStatus("engine0", 1, False)]


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("boom"), ConnectionResetError("boom")])
def test_a_round_that_is_refused_changes_nothing(sync, engine, loader, source, error):
    before = dict(loader.weights)
    engine.fails["round"] = error
    with pytest.raises(EngineError, match="boom") as caught:
        sync.push(2)
    assert (caught.value.engine, caught.value.where) == ("engine0", "run_round")
    assert engine.calls[:2] == ["round", "confirm"]
    assert_equal(loader.weights, before)
    assert sync.status() == [EngineStatus("engine0", 1, False)]
    sync.push(2)
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


def test_a_round_that_a_worker_refuses_changes_nothing(
    sync, engine, loader, source, mapping_fabric
):
    before = dict(loader.weights)
    mapping_fabric.check_error = CorruptTransfer("odd")
    with pytest.raises(CorruptTransfer, match="odd"):
        sync.push(2)
    assert engine.round.state is State.IDLE
    assert_equal(loader.weights, before)
    mapping_fabric.check_error = None
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_commit_that_fails_tears(sync, engine, loader, source):
    loader.fail = ValueError("layer")
    with pytest.raises(TornModel, match="ValueError: layer"):
        sync.push(2)
    (link,) = sync._members.links
    assert (link.torn, link.whole) == (True, False)
    assert sync.status() == [EngineStatus("engine0", 1, True)]
    loader.fail = None
    sync.push(2)
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]


@contextmanager
def lost(engine, error, *, reached):
    """The answer to a round; and whether the call came through."""
    run_round = engine.run_round

    def losing(info, version):
        if reached:
            run_round(info, version)
        raise error

    engine.run_round = losing
    try:
        yield
    finally:
        engine.run_round = run_round


@pytest.mark.parametrize("reached", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [Timeout("slow"), PeerDead("gone")])
def test_an_answer_that_is_lost_is_asked_after(sync, engine, loader, source, error, reached):
    with lost(engine, error, reached=reached), pytest.raises(type(error)):
        sync.push(2)
    held = 2 if reached else 1
    assert sync._members.links[0].version == held  # it was asked when the round was given up
    assert sync.status() == [EngineStatus("engine0", held, False)]
    source["a"].add_(1)
    sync.push(3)
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 3, False)]


def test_an_answer_of_a_torn_engine_that_is_lost(sync, engine, loader, source):
    loader.fail = ValueError("layer")

    def losing(info, version):
        with pytest.raises(RuntimeError, match="layer"):
            type(engine).run_round(engine, info, version)
        raise Timeout("slow")

    engine.run_round = losing
    with pytest.raises(Timeout):
        sync.push(2)
    assert sync.status() == [EngineStatus("engine0", 1, True)]
    del engine.run_round
    loader.fail = None
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_commit_that_was_followed_by_an_error_is_a_success(sync, engine, loader, source, caplog):
    with lost(engine, ConnectionResetError("reset"), reached=True):
        result = sync.push(2)
    assert result.version == 2
    assert "has committed, though it said" in caplog.text
    assert_equal(loader.weights, source)
    assert sync.status() == [EngineStatus("engine0", 2, False)]
    source["a"].add_(1)
    sync.push(3)
    assert_equal(loader.weights, source)


def test_an_engine_that_cannot_be_asked_either(sync, engine, loader, source, monkeypatch):
    def gone(*args):
        raise PeerDead("gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", gone)
        with lost(engine, Timeout("slow"), reached=True), pytest.raises(Timeout):
            sync.push(2)
        (status,) = sync.status()
        assert (status.version, status.torn) == (1, False)
        assert "gone" in status.error
    assert sync.status() == [EngineStatus("engine0", 2, False)]
    sync.push(3)
    assert_equal(loader.weights, source)


def test_an_interrupt_is_passed_on(sync, engine, loader, source):
    engine.fails["round"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        sync.push(2)
    assert sync.status() == [EngineStatus("engine0", 1, False)]
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_trainer_that_was_replaced_is_told(sync, connect, engine, loader):
    other = {"a": torch.full((3,), 4.0)}
    second = connect(engine, other)
    second.push(1)
    with pytest.raises(Superseded) as error:
        sync.push(2)
    assert "connect again" in error.value.cure
    assert "abort" not in engine.calls
    assert_equal(loader.weights, other)


def test_two_trainers_in_turns(connect, engine, loader):
    """The refused start of the one that was replaced leaves a round open."""
    sources = [{"a": torch.full((3,), float(n))} for n in range(2)]
    first, second = (connect(engine, source) for source in sources)
    for version in range(1, 4):
        with pytest.raises(Superseded):
            first.push(version)
        second.push(version)
        assert_equal(loader.weights, sources[1])


@pytest.mark.parametrize("left", ["start", "open"])
def test_a_round_that_was_left_open_is_given_up(sync, engine, loader, source, left):
    engine.start_weight_update()
    if left == "open":
        info = sync._members.links[0]._info("open", Deadline(30))
        engine.update_weights(info.to_wire() | {"version": 2})
    sync.push(2)
    assert_equal(loader.weights, source)


# -- the client of an LLM --------------------------------------------------------------------------


class FakeLLM:
    """Of vLLM's LLM, what a round takes; ``notes`` are its calls."""

    def __init__(self, backend="memory", answer=None, *, keeps_versions=True):
        config = types.SimpleNamespace(
            weight_transfer_config=types.SimpleNamespace(backend=backend)
        )
        core = types.SimpleNamespace(resources=types.SimpleNamespace(engine_dead=False))
        self.llm_engine = types.SimpleNamespace(vllm_config=config, engine_core=core)
        self.notes = []
        self.answer = [{"wire": 1.0, "load": 2.0}] if answer is None else answer
        if keeps_versions:
            self.llm_engine.set_weight_version = self.notes.append

    def finish_weight_update(self, weight_version=None): ...

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.notes.append((method, args, kwargs))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class OlderLLM(FakeLLM):
    """Of a release without versions."""

    def __init__(self):
        super().__init__(keeps_versions=False)

    def finish_weight_update(self): ...


@pytest.fixture
def installed(monkeypatch):
    """One backend, whatever else this environment has."""
    monkeypatch.setattr(
        registry, "default", lambda: types.SimpleNamespace(backends={"memory": None})
    )


INFO = {"op": "all", "deadline_s": 5.0}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["memory", "wt_memory"])
def test_an_llm_is_asked_once_and_told_its_version_then(backend):
    llm = FakeLLM(backend)
    assert LocalClient(llm).run_round(INFO, "7") == [{"wire": 1.0, "load": 2.0}]
    assert llm.notes == [(methods.ROUND, (), {"update_info": INFO}), "7"]


@pytest.mark.usefixtures("installed")
def test_an_llm_whose_round_fails_keeps_its_version():
    llm = FakeLLM(answer=RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"):
        LocalClient(llm).run_round(INFO, "7")
    assert llm.notes == [(methods.ROUND, (), {"update_info": INFO})]


@pytest.mark.usefixtures("installed")
def test_an_llm_of_a_release_without_versions():
    llm = OlderLLM()
    assert LocalClient(llm).run_round(INFO, "7") == [{"wire": 1.0, "load": 2.0}]
    assert len(llm.notes) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "llm",
    [FakeLLM("nccl"), FakeLLM(""), FakeLLM(keeps_versions=False)],
    ids=["another backend", "none", "a version that could not be told"],
)
def test_an_llm_that_cannot_is_not_called(llm):
    assert LocalClient(llm).run_round(INFO, "7") is None
    assert llm.notes == []


@pytest.mark.usefixtures("installed")
def test_an_llm_that_does_not_answer_a_round():
    llm, hold = FakeLLM(), threading.Event()
    llm.collective_rpc = lambda *args, **kwargs: hold.wait(20)
    with pytest.raises(Timeout, match="did not answer") as error:
        LocalClient(llm, slack_s=0.02).run_round(INFO | {"deadline_s": 0.01}, "7")
    hold.set()
    assert error.value.where == "run_round"
    assert llm.notes == []


@pytest.mark.usefixtures("installed")
def test_an_llm_that_dies_in_a_round():
    llm, hold = FakeLLM(), threading.Event()
    llm.collective_rpc = lambda *args, **kwargs: hold.wait(20)
    llm.llm_engine.engine_core.resources.engine_dead = True
    with pytest.raises(PeerDead):
        LocalClient(llm).run_round(INFO, "7")
    hold.set()


@pytest.mark.usefixtures("installed")
def test_calls_after_one_that_never_came_back_do_not_wait_for_it():
    llm, hold = FakeLLM(), threading.Event()
    client = LocalClient(llm, slack_s=0.05)
    answer = llm.collective_rpc
    llm.collective_rpc = lambda *args, **kwargs: hold.wait(20)
    try:
        with pytest.raises(Timeout):
            client.run_round(INFO | {"deadline_s": 0.01}, "7")
        llm.collective_rpc = answer
        told = client.run_round(INFO | {"deadline_s": 1.0}, "8")
        assert told == [{"wire": 1.0, "load": 2.0}]
        assert "8" in llm.notes
    finally:
        hold.set()


# -- the workers -----------------------------------------------------------------------------------


class TwoRanks:
    """Reports of two ranks meet; one that waits in vain gives up soon."""

    size = 2

    def __init__(self, rank, barrier, reports, wait_s):
        self.rank, self._barrier, self._reports, self._wait_s = rank, barrier, reports, wait_s

    def exchange(self, report, seconds):
        self._reports[self.rank] = Report.decode(report.encode())
        try:
            self._barrier.wait(self._wait_s)
            reports = list(self._reports)
            self._barrier.wait(self._wait_s)
        except threading.BrokenBarrierError:
            raise Timeout("The ranks of the engine could not agree") from None
        return reports


class FakeVllmWorker:
    """vLLM's worker, as far as a round goes: it refuses calls that are out of turn by itself."""

    weight_transfer_engine = None
    _weight_update_active = False

    def init_weight_transfer_engine(self, init_info):
        self.weight_transfer_engine.init_transfer_engine(init_info)

    def start_weight_update(self):
        if self._weight_update_active:
            raise RuntimeError("vLLM: already active")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info):
        if not self._weight_update_active:
            raise RuntimeError("vLLM: not active")
        self.weight_transfer_engine.update_weights(update_info)

    def finish_weight_update(self):
        if not self._weight_update_active:
            raise RuntimeError("vLLM: not active")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False


class Workers:
    """Two workers of vLLM's class, with our engine, that are called at once."""

    def __init__(self, worker_cls, engine_cls, wait_s):
        barrier, reports = threading.Barrier(2), [None, None]
        self.engines = [StubEngine(rank, 2) for rank in range(2)]
        self.loaders = [DictLoader() for _ in range(2)]
        self.rounds, self.workers = [], []
        for rank in range(2):
            ranks = TwoRanks(rank, barrier, reports, wait_s)
            self.rounds.append(WorkerRound(self.engines[rank], self.loaders[rank], ranks))
            worker = worker_cls()
            worker.weight_transfer_engine = engine_cls.__new__(engine_cls)
            worker.weight_transfer_engine.forms = types.SimpleNamespace(
                current=self.rounds[rank], init=self.rounds[rank].init
            )
            self.workers.append(worker)

    def call(self, method, *args):
        """What each rank returns, or its error."""
        answers = [None, None]

        def run(rank):
            try:
                answers[rank] = getattr(self.workers[rank], method)(*args)
            except Exception as error:
                answers[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        return answers

    def init(self):
        assert self.call("init_weight_transfer_engine", init_info()) == [None, None]

    def run_round(self, version, **changes):
        return self.call(methods.ROUND, update_info("all", version, **changes))

    def succeed(self, version):
        for told in self.run_round(version):
            assert set(told) == {"wire", "load"}
            assert all(isinstance(each, float) and each >= 0 for each in told.values())
        for loader in self.loaders:
            assert_loaded(loader)
        assert [each.version for each in self.rounds] == [version, version]


@pytest.fixture
def bridged(monkeypatch):
    """The worker's engine class and vLLM's worker class, opened for it, without vLLM."""
    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferEngine = type("WeightTransferEngine", (), {})
    gpu_worker = types.ModuleType("vllm.v1.worker.gpu_worker")
    gpu_worker.Worker = type("Worker", (FakeVllmWorker,), dict(vars(FakeVllmWorker)))
    loader = types.ModuleType("vllm_wt.bridge.loader")
    loader.ModelWeights = None
    compat = types.ModuleType("vllm_wt.bridge.compat")
    for full in (base, gpu_worker):
        parts = full.__name__.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, full.__name__, full)
    for module in (loader, compat):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(bridge, name, module, raising=False)
    spec = importlib.util.find_spec("vllm_wt.bridge.worker")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gate.open_for(module.WorkerEngine)
    return gpu_worker.Worker, module.WorkerEngine


@pytest.fixture
def workers(bridged):
    workers = Workers(*bridged, wait_s=10)
    workers.init()
    return workers


def test_workers_take_a_round_in_one_call(workers):
    for version in (1, 2, 3):
        workers.succeed(version)
        assert [each.state for each in workers.rounds] == [State.IDLE, State.IDLE]


def test_a_worker_with_another_engine_has_no_rounds(bridged):
    worker_cls, _ = bridged
    worker = worker_cls()
    for engine in (None, object()):
        worker.weight_transfer_engine = engine
        assert getattr(worker, methods.ROUND)({}) is None


def fail_start(workers, rank):
    def start():
        raise OSError("no buffers")

    workers.engines[rank].start_weight_update = start
    return lambda: vars(workers.engines[rank]).pop("start_weight_update")


def fail_update(workers, rank):
    workers.engines[rank].error = OSError("cable")
    return lambda: setattr(workers.engines[rank], "error", None)


def fail_finish(workers, rank):
    workers.loaders[rank].fail = OSError("layer")
    return lambda: setattr(workers.loaders[rank], "fail", None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fail", "words", "cls"),
    [
        (fail_start, "no buffers", WeightTransferError),
        (fail_update, "cable", WeightTransferError),
        (fail_finish, "layer", TornModel),
    ],
)
def test_a_step_that_fails_on_one_rank_ends_the_call_on_both(workers, fail, words, cls, rank):
    workers.succeed(1)
    for loader in workers.loaders:
        loader.weights = {}
    mend = fail(workers, rank)
    low, high = workers.run_round(2)
    assert not isinstance(low, Exception), f"rank 0 raised, which puts vLLM out of step: {low!r}"
    assert low is None
    assert type(high).__name__ == "RoundError"
    error = from_text(str(high), where="run_round")
    assert isinstance(error, cls)
    assert list(error.ranks) == [rank]
    assert words in str(error)
    torn = cls is TornModel
    assert [each.state for each in workers.rounds] == [State.IDLE, State.IDLE]
    assert [each.torn for each in workers.rounds] == [torn, torn]
    assert [each.version for each in workers.rounds] == [1, 1]
    if not torn:
        assert [loader.weights for loader in workers.loaders] == [{}, {}]
    mend()
    workers.succeed(3)
    assert [each.torn for each in workers.rounds] == [False, False]


@pytest.mark.parametrize("info", [None, [], "x", {"op": "all"}])
def test_a_round_whose_info_is_none_ends_on_both(workers, info):
    low, high = workers.call(methods.ROUND, info)
    assert low is None
    assert type(high).__name__ == "RoundError"
    workers.succeed(1)


def test_a_round_of_a_trainer_that_was_replaced_ends_on_both(workers):
    low, high = workers.run_round(1, session="s0")
    assert low is None
    assert isinstance(from_text(str(high), where="run_round"), Superseded)
    assert [loader.weights for loader in workers.loaders] == [{}, {}]
    assert workers.call("update_weights", update_info("abort")) == [None, None]
    workers.succeed(1)


@pytest.mark.parametrize("left", ["open", "all"])
def test_a_round_before_the_last_one_has_ended_is_refused_on_both(workers, left):
    workers.call("start_weight_update")
    workers.call("update_weights", update_info(left))
    low, high = workers.run_round(2)
    assert low is None
    assert isinstance(from_text(str(high), where="run_round"), WrongOrder)


def test_a_round_after_a_start_that_was_left_alone_is_refused_on_both(bridged):
    workers = Workers(*bridged, wait_s=0.5)
    workers.init()
    assert workers.call("start_weight_update") == [None, None]
    low, high = workers.run_round(1)
    assert isinstance(from_text(str(high), where="run_round"), WrongOrder)
    assert low is None
