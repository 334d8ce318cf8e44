"""The planner's benchmark on few experts: its instances, and what it says; not how fast it is."""

import numpy as np
import pytest

from vllm_wt.errors import EngineError
from vllm_wt_sharded import bench_instances, bench_planner, bench_qwen

GOOD = {
    "needs": 1,
    "seconds": 20.0,
    "megabytes": 4000.0,
    "out_gigabytes": 2.1,
    "out_bound_gigabytes": 2.0,
    "out_ratio": 1.05,
    "ratio": 1.05,
}


@pytest.fixture(scope="module")
def tensors():
    return bench_instances.kimi_k2(experts=16)


def test_size_of_the_model():
    whole = bench_instances.kimi_k2()
    assert len(whole) == 69_975
    assert sum(meta.numel for meta in whole) == pytest.approx(1.03e12, rel=0.01)


def test_trainer(tensors):
    source = bench_instances.trainer(tensors)
    source.require_covering()
    assert source.ranks == 256
    (first,) = (
        i for i, m in enumerate(tensors) if m.name.endswith("layers.1.mlp.experts.0.up_proj.weight")
    )
    last = len(tensors) - 3
    assert tensors[last].name.endswith("layers.60.mlp.experts.15.down_proj.weight")
    assert (source.tensor == first).sum() == 2 * 4
    assert (source.tensor == last).sum() == 8 * 4


@pytest.mark.parametrize(
    ("destination", "copies"), [("ep128", {"experts": 1, "norm": 128}), ("tp16x8", {"experts": 8})]
)
def test_destinations_need_everything(tensors, destination, copies):
    needs = bench_instances.DESTINATIONS[destination](tensors)
    needs.require_covering()
    assert np.unique(needs.rank).tolist() == list(range(128))
    elements = np.bincount(needs.tensor, needs.size.prod(axis=1))
    for kind, count in copies.items():
        own = [i for i, meta in enumerate(tensors) if f".{kind}." in meta.name]
        assert elements[own].tolist() == [tensors[i].numel * count for i in own]


@pytest.mark.parametrize("destination", list(bench_instances.DESTINATIONS))
def test_measure(destination):
    found = bench_planner.measured_apart(destination, 16)
    assert found["tensors"] == len(bench_instances.kimi_k2(16))
    assert found["rows"] >= found["needs"] > 128 * 600
    assert 0 < found["planned_seconds"] <= found["seconds"]
    assert found["megabytes"] > 10
    assert 1 <= found["ratio"] <= 1.05
    assert 1 <= found["out_ratio"] <= 1.05
    assert found["out_gigabytes"] == pytest.approx(
        found["out_ratio"] * found["out_bound_gigabytes"], rel=1e-3
    )


def test_process_that_fails():
    with pytest.raises(EngineError, match=r"Where: nowhere. Got: exit code 1"):
        bench_planner.measured_apart("nowhere", 16)


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"seconds": 20.1}, False),
        ({"megabytes": 4001.0}, False),
        ({"ratio": 1.06}, False),
        ({"out_ratio": 1.06}, False),
    ],
)
def test_ok_demands_every_bound(monkeypatch, change, ok):
    monkeypatch.setattr(bench_planner, "computed", lambda: "computed")
    result = bench_planner.result_of({"one": GOOD | {"out_ratio": 1.0}, "two": GOOD | change})
    assert result["ok"] is ok
    assert result["ratio"] == max(1.05, change.get("out_ratio", 0))
    assert (result["name"], result["unit"], result["bound"]) == ("planner", "GB", 1.05)
    assert (result["value"], result["baseline"]) == (2.1, 2.0)
    assert len(result["samples"]["ours_s"]) == 2
    assert result["details"]["qwen3_235b"] == "computed"
    assert result["details"]["two"] == GOOD | change


def test_both_are_measured(monkeypatch):
    measured = []

    def apart(destination, experts):
        measured.append((destination, experts))
        return GOOD

    monkeypatch.setattr(bench_planner, "measured_apart", apart)
    monkeypatch.setattr(bench_planner, "computed", lambda: "computed")
    result, summary = bench_planner.planner()
    assert measured == [("ep128", 384), ("tp16x8", 384)]
    assert result["ok"] is True
    assert summary.count("planned in 20.0 s (at most 20), 4000 MB") == 2


def test_qwen():
    found = bench_qwen.computed()
    assert found["gigabytes"] == pytest.approx(470, abs=2)
    # An eighth of 227e9 parameters of experts and all of 8e9 others; an eighth of all.
    assert found["dp8ep8"]["busiest_gigabytes"] == pytest.approx(2 * (227.1 / 8 + 8.0), rel=0.01)
    assert found["tp8"]["busiest_gigabytes"] == pytest.approx(470.2 / 8, rel=0.01)
    for name, published in (("dp8ep8", 3.3), ("tp8", 6.1)):
        each = found[name]
        assert each["seconds"] == pytest.approx(each["busiest_gigabytes"] / 50, abs=0.01)
        assert each["published_sharded_rdt_seconds"] == published
