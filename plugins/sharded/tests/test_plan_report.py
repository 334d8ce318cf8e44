"""Figures and lines of a planned transfer, from links that are made up."""

import json

import numpy as np
import pytest

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.plan_report import Links, Report

NEEDED = [[2_000_000, 0, 1_000_000], [1_000_000, 2_000_000, 0]]
READ = [[2_500_000, 0, 1_000_000], [1_500_000, 2_500_000, 0]]
READS = [[3, 0, 1], [2, 4, 0]]


def report(needed=NEEDED, read=READ, reads=READS, **changes):
    """Of two ranks and three workers; both ranks have all of a tensor."""
    needed, reads, read = (np.array(each, dtype=np.int64) for each in (needed, reads, read))
    tensors = [TensorMeta("a", "bfloat16", (1_000_000, 2))]
    rows = [("a", rank, (0, 0), (1_000_000, 2)) for rank in range(len(needed))]
    fields = {
        "spec": "hsdp:2x1",
        "source": Layout.of(tensors, rows),
        "replicas": 3,
        "links": Links(needed, reads, read),
        "out_bound": 2_000_000.0,
        "in_bound": 2_500_000,
        "speeds": (50.0, 0.001),
    }
    return Report(**(fields | changes))


def test_figures():
    found = report().as_json()
    assert json.loads(json.dumps(found)) == found
    assert (found["ranks"], found["workers"], found["replicas"]) == (2, 3, 3)
    assert (found["model_bytes"], found["held_bytes"]) == (4_000_000, 8_000_000)
    assert found["links"] == NEEDED
    assert found["bytes"] == 6_000_000
    assert found["out"] == {"max": 3_000_000, "busiest": 0, "mean": 3e6, "max_over_mean": 1.0}
    assert found["in"] == {"max": 3_000_000, "busiest": 0, "mean": 2e6, "max_over_mean": 1.5}
    assert found["bound"] == {"out_bytes": 2_000_000, "in_bytes": 2_500_000, "ratio": 1.2}
    assert (found["reads"], found["read_bytes"], found["read_links"]) == (10, 7_500_000, READ)


def test_seconds_are_those_of_the_busiest_side():
    assert report().seconds == [4_000_000 / 50e9, 4.0]
    assert report(read=[[1, 0, 1], [1, 2_000, 3_000]]).seconds[0] == 5_001 / 50e9
    assert report(read=[[5_000, 0, 0], [1, 2_000, 0]]).seconds[0] == 5_001 / 50e9
    assert "not measured" in report().as_json()["computed"]


def test_lines():
    lines = list(report().lines())
    assert len(lines) == 10
    assert lines[0] == "trainer    hsdp:2x1: 2 ranks hold 8.00 MB, 2.00 times the model"
    assert lines[1] == "workers    3 workers in 3 engines take 6.00 MB over 4 of 6 links"
    assert "at most 3.00 MB, of rank 0; mean 3.00 MB, max / mean 1.000" in lines[2]
    assert "at most 3.00 MB, of worker 0; mean 2.00 MB, max / mean 1.500" in lines[3]
    assert "1.200 times the least possible" in lines[4]
    assert "10 of 7.50 MB, 1.25 times what is needed" in lines[5]
    assert "8e-05 at 50 GB/s, 4 at 0.001 GB/s: computed, not measured" in lines[6]
    assert lines[7].split("worker")[1:] == [" 0     ", " 1     ", " 2"]
    assert lines[9].split() == ["rank", "1", "1.00", "MB", "2.00", "MB", "0", "bytes"]
    assert len({len(line) for line in lines[7:]}) == 1


@pytest.mark.parametrize("shape", [(9, 2), (2, 9)])
def test_many_links_are_not_shown_one_by_one(shape):
    many = np.ones(shape, dtype=np.int64)
    assert len(list(report(many, many, many).lines())) == 7


def test_nothing_is_needed():
    nothing = np.zeros((1, 1), dtype=np.int64)
    found = report(nothing, nothing, nothing, replicas=1, out_bound=0.0, in_bound=0)
    assert found.as_json()["in"] == {"max": 0, "busiest": 0, "mean": 0.0, "max_over_mean": 0.0}
    assert found.ratio == 0
    assert "1 worker in 1 engine take 0 bytes over 0 of 1 link" in "\n".join(found.lines())
