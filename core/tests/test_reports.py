"""What a worker says of itself: how it is made, how it is asked for, and what is no report."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace

import pytest
import torch

from vllm_wt import methods
from vllm_wt.bridge import gate
from vllm_wt.connecting import Claim, connect_each
from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    LoadError,
    PeerDead,
    Timeout,
    to_text,
)
from vllm_wt.link import EngineLink
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.ranks import SingleRank
from vllm_wt.reports import WorkerReport, decoded
from vllm_wt.round import WorkerRound
from vllm_wt.source import as_source

from .support.engines import InProcessEngine
from .test_round import StubEngine, commit, connected, update_info

TOLD = {
    "rank": 1,
    "version": 3,
    "torn": False,
    "state": "idle",
    "streams": False,
    "staging": "device",
    "why": "asked for",
    "arena_nbytes": 4096,
}
REPORT = WorkerReport(
    rank=1,
    version=3,
    torn=False,
    state="idle",
    streams=False,
    facts={"staging": "device", "why": "asked for", "arena_nbytes": 4096},
)


# -- decoding ------------------------------------------------------------------------------------


def test_a_report_is_decoded():
    assert WorkerReport.decode(TOLD, where="reports[0]") == REPORT
    assert decoded([TOLD, TOLD | {"rank": 2}], where="reports") == (REPORT, replace(REPORT, rank=2))
    assert hash(REPORT) == hash(replace(REPORT, facts={}))


@pytest.mark.parametrize("told", [None, [], [None, None]])
def test_nothing_told_is_no_report(told):
    assert decoded(told, where="reports") == ()


def without(name):
    return {key: value for key, value in TOLD.items() if key != name}


@pytest.mark.parametrize(
    ("told", "where", "got"),
    [
        *((without(name), "r[0]", "dict") for name in list(TOLD)[:5]),
        (TOLD | {"rank": "1"}, "r[0].rank", "'1'"),
        (TOLD | {"rank": True}, "r[0].rank", "True"),
        (TOLD | {"rank": -1}, "r[0].rank", "-1"),
        (TOLD | {"rank": None}, "r[0].rank", "None"),
        (TOLD | {"version": "3"}, "r[0].version", "'3'"),
        (TOLD | {"version": 3.0}, "r[0].version", "3.0"),
        (TOLD | {"version": False}, "r[0].version", "False"),
        (TOLD | {"version": -1}, "r[0].version", "-1"),
        (TOLD | {"version": 2**63}, "r[0].version", str(2**63)),
        (TOLD | {"torn": 0}, "r[0]", "dict"),
        (TOLD | {"torn": None}, "r[0]", "dict"),
        (TOLD | {"state": 0}, "r[0]", "dict"),
        (TOLD | {"state": "x" * 5000}, "r[0].state", "'" + "x" * 199),
        (TOLD | {"streams": "no"}, "r[0]", "dict"),
        (TOLD | {"why": None}, "r[0]", "'why': None"),
        (TOLD | {"why": ["a"]}, "r[0]", "'why': list"),
        (TOLD | {"why": {"a": 1}}, "r[0]", "'why': dict"),
        (TOLD | {"why": math.nan}, "r[0]", "'why': nan"),
        (TOLD | {"why": math.inf}, "r[0]", "'why': inf"),
        (TOLD | {"why": 2**63}, "r[0]", f"'why': {2**63}"),
        (TOLD | {"why": "y" * 5000}, "r[0]", "'why': '" + "y" * 199),
        (TOLD | {"n" * 5000: 1}, "r[0]", "'" + "n" * 199 + ": 1"),
        (TOLD | {5: 1}, "r[0]", "5: 1"),
        (TOLD | {str(n): n for n in range(64)}, "r[0]", "67"),
        (TOLD | {"error": ["a"]}, "r[0]", "'error': list"),
        ({"error": 1}, "r[0]", "dict"),
        ({}, "r[0]", "dict"),
        ([], "r[0]", "list"),
        ("text", "r[0]", "str"),
        (None, "r[1]", "NoneType"),
    ],
)
def test_what_is_no_report(told, where, got):
    answer = [TOLD, None] if told is None else [told]
    with pytest.raises(CorruptTransfer, match="report of itself") as caught:
        decoded(answer, where="r")
    assert (caught.value.where, str(caught.value.got)) == (where, got)
    assert caught.value.expected
    assert caught.value.cure


@pytest.mark.parametrize("told", [{"rank": 1}, "text", 7, True, (TOLD,)])
def test_what_is_no_list_of_reports(told):
    with pytest.raises(CorruptTransfer, match="a list of objects") as caught:
        decoded(told, where="reports")
    assert caught.value.got == type(told).__name__


def test_a_worker_that_could_not_make_its_report():
    with pytest.raises(EngineError, match="ValueError: boom") as caught:
        decoded([TOLD, {"error": "ValueError: boom"}], where="reports")
    assert caught.value.where == "reports[1]"
    text = to_text(LoadError("No memory", where="arena", cure="leave some"))
    with pytest.raises(LoadError, match="No memory") as caught:
        decoded([{"error": text}], where="reports")
    assert caught.value.where == "arena"


# -- the worker ----------------------------------------------------------------------------------


class TalkativeEngine(StubEngine):
    """Has facts of its own, and claims what it has no say in."""

    def report(self):
        return {"colour": "red", "version": 99, "torn": "perhaps", "rank": -5}


def test_a_round_says_what_it_holds(loader):
    worker = WorkerRound(StubEngine(), loader, SingleRank())
    new = {"rank": 0, "state": "idle", "version": None, "torn": False, "streams": False}
    assert worker.report() == new
    commit(connected(worker), 4)
    assert worker.report() == new | {"version": 4}
    worker.start()
    assert worker.report() == new | {"version": 4, "state": "started"}
    worker.update(update_info("open", 5))
    assert worker.report() == new | {"version": 4, "state": "receiving"}
    worker.update(update_info("seal", 5))
    worker.torn = worker._agreement.streams = True
    expected = {"version": 4, "state": "sealed", "torn": True, "streams": True}
    assert worker.report() == new | expected


def test_a_backend_has_no_say_in_what_the_round_holds(loader):
    worker = WorkerRound(TalkativeEngine(), loader, SingleRank())
    commit(connected(worker), 4)
    report = WorkerReport.decode(worker.report(), where="reports[0]")
    assert report == WorkerReport(0, 4, False, "idle", False, {"colour": "red"})


@pytest.mark.parametrize("staging", ["device", "none"])
def test_a_worker_says_where_it_receives_and_why(transport_cls, loader, staging):
    context = WorkerContext(backend="memory", device=torch.device("cpu"), rank=0, size=1)
    engine = PullEngine(context, transport_cls)
    worker = WorkerRound(engine, loader, SingleRank())
    before = {"owner": "", "staging": "device", "why": "nothing is received yet"}
    assert engine.report() == before | {"arena_nbytes": 0, "needed_nbytes": 0}
    source = as_source({"a": torch.arange(3000.0)})
    trainer = PullTrainer(source, backend="memory", transport_cls=transport_cls, staging=staging)
    worker.init(trainer.describe(Deadline(30)).to_wire())
    facts = WorkerReport.decode(json.loads(json.dumps(worker.report())), where="r").facts
    assert (facts["staging"], facts["why"]) == (staging, "asked for")
    assert facts["arena_nbytes"] >= facts["needed_nbytes"] >= 12000
    assert facts["arena_nbytes"] == engine.arena_nbytes
    assert worker.report()["streams"] == (staging == "none")
    smaller = as_source({"a": torch.arange(10.0)})
    second = PullTrainer(smaller, backend="memory", transport_cls=transport_cls)
    worker.init(second.describe(Deadline(30)).to_wire())
    again = worker.report()
    assert again["arena_nbytes"] == facts["arena_nbytes"]  # it is kept
    assert again["needed_nbytes"] < facts["needed_nbytes"]
    worker.shutdown()
    assert worker.report()["needed_nbytes"] == 0
    trainer.shutdown()
    second.shutdown()


# -- vLLM's worker class, by a stand-in ----------------------------------------------------------


class Engine:
    """Of `WorkerEngine`, what the worker asks."""

    def __init__(self, told):
        self.told = told

    def report(self):
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.fixture
def worker(monkeypatch):
    """A worker of vLLM's class, opened for `Engine`."""

    class Worker:
        def start_weight_update(self): ...

        def update_weights(self, info): ...

        def finish_weight_update(self): ...

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.worker.gpu_worker"].Worker = Worker
    gate.open_for(Engine)
    return Worker()


def test_a_worker_with_our_engine_passes_its_report_on(worker):
    worker.weight_transfer_engine = Engine({"rank": 0, "pair": (1, 2)})
    assert getattr(worker, methods.REPORT)() == {"rank": 0, "pair": [1, 2]}


@pytest.mark.parametrize("attributes", [{}, {"weight_transfer_engine": None}])
def test_a_worker_without_an_engine_of_ours_says_nothing(worker, attributes):
    vars(worker).update(attributes)
    assert worker.vllm_wt_report() is None
    worker.weight_transfer_engine = object()
    assert worker.vllm_wt_report() is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (ValueError("boom"), "ValueError('boom')"),
        (LoadError("No memory", where="arena", cure="leave some"), "No memory"),
        (Unspeakable(), "Unspeakable"),
        ({"rank": {1}}, "TypeError"),
        ({"rank": math.nan}, "ValueError"),
    ],
)
def test_a_report_that_fails_says_so_and_raises_nothing(worker, told, words):
    worker.weight_transfer_engine = Engine(told)
    answer = json.loads(json.dumps(worker.vllm_wt_report()))
    assert list(answer) == ["error"]
    assert words in answer["error"]
    if isinstance(told, LoadError):
        with pytest.raises(LoadError):
            WorkerReport.decode(answer, where="reports[0]")


# -- the trainer's side --------------------------------------------------------------------------


class Telling(InProcessEngine):
    """One that can be asked; ``told`` stands in for what its worker says."""

    told: object = None

    def reports(self):
        self.calls.append("reports")
        if isinstance(self.told, Exception):
            raise self.told
        return [self.round.report()] if self.told is None else self.told


@pytest.fixture
def make_link(transport_cls):
    trainers = []

    def make(client):
        trainer = PullTrainer(
            as_source({"a": torch.ones(5)}), backend="memory", transport_cls=transport_cls
        )
        trainers.append(trainer)
        return EngineLink(client, trainer, "engine0")

    yield make
    for trainer in trainers:
        trainer.shutdown()


def test_an_engine_is_asked_for_its_reports(make_link, transport_cls, loader):
    link = make_link(Telling(transport_cls, loader))
    connect_each(link._trainer, [link], Deadline(30), Claim())
    (report,) = link.reports(Deadline(30))
    assert (report.rank, report.version, report.torn, report.state) == (0, None, False, "idle")
    assert report.facts["arena_nbytes"] >= report.facts["needed_nbytes"] > 0


def test_a_client_that_cannot_be_asked(make_link, transport_cls, loader):
    assert make_link(InProcessEngine(transport_cls, loader)).reports(Deadline(30)) == ()


@pytest.mark.parametrize(
    ("told", "cls"),
    [
        ("text", CorruptTransfer),
        ([{"rank": 0}], CorruptTransfer),
        ([{"error": "boom"}], EngineError),
        (RuntimeError("boom"), EngineError),
        (PeerDead("gone"), PeerDead),
    ],
)
def test_an_answer_that_is_none_is_a_typed_error(make_link, transport_cls, loader, told, cls):
    client = Telling(transport_cls, loader)
    client.told = told
    with pytest.raises(cls) as caught:
        make_link(client).reports(Deadline(30))
    assert caught.value.engine == "engine0"


def test_nothing_is_asked_after_the_deadline(make_link, transport_cls, loader):
    client = Telling(transport_cls, loader)
    passed = Deadline(30)
    passed._end = 0.0
    with pytest.raises(Timeout, match="no time left") as caught:
        make_link(client).reports(passed)
    assert caught.value.where == "reports"
    assert client.calls == []


def test_reports_are_no_word_on_whose_the_engine_is(make_link, transport_cls, loader):
    """Its workers answer for another trainer, too: they must not be resumed under that one."""
    client = Telling(transport_cls, loader)
    client.pause = client.resume = lambda: client.calls.append("resume or pause")
    link = make_link(client)
    connect_each(link._trainer, [link], Deadline(30), Claim())
    link.pause()
    other = make_link(client)
    connect_each(other._trainer, [other], Deadline(30), Claim())
    with pytest.raises(Exception, match="Another trainer"):
        link.ask(Deadline(30))
    client.calls.clear()
    assert len(link.reports(Deadline(30))) == 1
    client.told = PeerDead("gone")
    with pytest.raises(PeerDead):
        link.reports(Deadline(30))
    link.leave()
    assert client.calls == ["reports", "reports"]
