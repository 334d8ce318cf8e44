"""What is written of rounds: lines of JSON, and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from vllm_wt.errors import BackendUnavailable, TransportError
from vllm_wt.link import Stages
from vllm_wt.observers import RoundLog, RoundMetrics, observe
from vllm_wt.results import PushResult

from .support.engines import connecting
from .support.pair import Pair, Trainer, fail_to_receive


@pytest.fixture
def hears():
    """Has an observer hear of the rounds of a test."""
    with ExitStack() as stack:
        yield lambda observer: stack.callback(observe(observer))


@pytest.fixture
def pair(monkeypatch, transport_cls):
    with connecting(monkeypatch, transport_cls, Trainer) as connect:
        yield Pair(connect, transport_cls)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(**facts):
    stages = {
        "a": Stages(start=0.1, wire=1.0, verify=0.2, load=0.3, confirm=0.01, stop=0.5, resume=0.04),
        "b": Stages(start=0.1, wire=1.5, verify=0.1, load=0.4, confirm=0.01, stop=0.2, resume=0.05),
    }
    return PushResult(7, 4_000_000_000, 30, 0.05, 2.0, stages, **facts)


def test_rates_and_the_slowest_of_each_stage():
    found = result()
    assert (found.gb_per_s, found.stop_s, found.commit_s, found.resume_s) == (2.0, 0.5, 0.4, 0.05)
    follower = PushResult(7, 10, 1, 0.0, 0.0, {})
    assert (follower.gb_per_s, follower.stop_s, follower.commit_s) == (0.0, 0.0, 0.0)


def test_a_line_for_each_round(pair, hears, tmp_path):
    path = tmp_path / "rounds.jsonl"
    hears(RoundLog(path))
    began = time.time()
    done = pair.sync.push(2)
    fail_to_receive(pair.engines[1].engine)
    with pytest.raises(TransportError):
        pair.sync.push(3)
    good, bad = lines(path)
    assert began <= good["time"] <= bad["time"] <= time.time()
    assert (good["ok"], good["version"], good["tensors"], good["nbytes"]) == (True, 2, 2, 60)
    assert good["engines"]["engine0"] == vars(done.engines["engine0"])
    assert set(good["engines"]) == {"engine0", "engine1"}
    assert (good["total_s"], good["gb_per_s"]) == (done.total_s, done.gb_per_s)
    assert (good["stop_s"], good["commit_s"], good["failed"]) == (done.stop_s, done.commit_s, {})
    assert (bad["ok"], bad["version"], bad["error"]["code"]) == (False, 3, TransportError.code)
    assert "link_share" not in good


def test_the_share_of_a_link_and_who_was_left_out(tmp_path):
    path = tmp_path / "rounds.jsonl"
    log = RoundLog(path, link_gb_per_s=50.0)
    log.vllm_wt_round_finished(result(failed={"b": TransportError("cut", cure="mend it")}))
    (line,) = lines(path)
    assert line["link_share"] == 0.04
    assert line["failed"] == {"b": {"code": TransportError.code, "what": "cut", "cure": "mend it"}}


def test_who_has_left_hears_no_more(pair, tmp_path):
    path = tmp_path / "rounds.jsonl"
    leave = observe(RoundLog(path))
    pair.sync.push(2)
    leave()
    leave()
    pair.sync.push(3)
    assert [line["version"] for line in lines(path)] == [2]


def test_metrics(pair, hears):
    found = CollectorRegistry()
    hears(RoundMetrics(found))
    pair.sync.push(2)
    pair.sync.push(5)
    fail_to_receive(pair.engines[1].engine)
    with pytest.raises(TransportError):
        pair.sync.push(6)

    def value(name, **labels):
        return found.get_sample_value(f"vllm_wt_{name}", labels)

    assert value("rounds_total", outcome="ok", code="") == 2
    assert value("rounds_total", outcome="failed", code=TransportError.code) == 1
    assert (value("bytes_total"), value("version")) == (120, 5)
    assert value("round_seconds_count") == 2
    assert value("stage_seconds_count", stage="load") == 4  # two engines
    assert value("engines_left_out_total") == 0


def test_without_prometheus_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(BackendUnavailable) as caught:
        RoundMetrics()
    assert caught.value.cure == "pip install 'vllm-wt[prometheus]'"


def test_observers_are_imported_without_it():
    code = "import sys, vllm_wt.observers; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
