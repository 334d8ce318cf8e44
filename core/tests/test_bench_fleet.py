"""``vllm-wt bench fleet``: its arithmetic, and a small run of it; not how fast it is."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.cli import bench, bench_fleet_reader, main
from vllm_wt.cli.bench_fleet import Measured, _elapsed, _summary, result
from vllm_wt.cli.bench_fleet_processes import Fleet, Span, _span
from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead
from vllm_wt.testing.conformance.resources import resources
from vllm_wt.transport import Copy

from .conftest import MemoryTransport

SMALL = [
    *("bench", "fleet", "--readers", "2", "--gib", "0.02", "--tensors", "9"),
    *("--rounds", "2", "--deaths", "2"),
]
CPU = torch.device("cpu")


def _measured(**others: Any) -> Measured:
    given: dict[str, Any] = {
        "all_s": {"digest": [1.1, 2.2, 9.0], "bytes": [1.0, 2.1, 9.0], "raw": [1.0, 2.0, 3.0]},
        "undisturbed_s": [1.0, 2.0, 3.0],
        "disturbed_s": [1.0, 2.2, 9.0],
        "deaths": 3,
    }
    return Measured(**(given | others))


# -- the arithmetic --------------------------------------------------------------------------------


def test_ratios_are_of_rounds_and_the_rise_is_of_medians() -> None:
    found = result(_measured(), 4, 1 << 30)
    assert list(found) == [
        "name", "value", "baseline", "unit", "ratio", "bound", "ok", "samples", "details",
    ]  # fmt: skip
    assert (found["value"], found["baseline"], found["unit"]) == (2.2, 2.0, "s")
    assert (found["ratio"], found["bound"], found["ok"]) == (1.1, 1.15, True)
    details = found["details"]
    assert (details["ratio_without_digests"], details["others_rise"]) == (1.05, 0.1)
    assert (details["readers"], details["gib"], details["deaths"]) == (4, 1.0, 3)


@pytest.mark.parametrize(
    "missed",
    [
        {"all_s": {"digest": [1.16], "bytes": [1.0], "raw": [1.0]}},
        {"all_s": {"digest": [1.0], "bytes": [1.16], "raw": [1.0]}},
        {"disturbed_s": [2.41]},
        {"checked": False},
    ],
    ids=["digests", "without digests", "rise", "content"],
)
def test_one_bound_that_is_missed_is_enough(missed: dict[str, Any]) -> None:
    assert result(_measured(**missed), 4, 1 << 30)["ok"] is False


def test_others_that_are_faster_are_fine() -> None:
    found = result(_measured(disturbed_s=[0.5]), 4, 1 << 30)
    assert (found["ok"], found["details"]["others_rise"]) == (True, -0.75)


def test_summary() -> None:
    assert _summary(result(_measured(checked=False), 4, 1 << 30)) == (
        "4 readers of 1 GiB: 2.20 s, bare reads 2.00 s, ratio 1.10, without digests 1.05 (at most "
        "1.15); the others' time when one dies: +10% (at most +20%); what came is WRONG"
    )


def test_a_round_takes_until_the_last_reader_that_lives_has_ended() -> None:
    assert _elapsed([Span(2.0, 3.0), None, Span(1.0, 2.5)]) == 2.0


# -- readers ---------------------------------------------------------------------------------------


def test_a_reader_dies_when_a_share_of_the_bytes_has_come(
    transport_cls: type[MemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = bench_fleet_reader.Reader("rdma", "cpu", 0, 2)
    reader._nbytes = 100
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    owner = transport_cls("owner", CPU)
    handle = owner.expose(owner.register([torch.ones(25, dtype=torch.uint8)]), 1)
    transport = bench_fleet_reader.counting(transport_cls, reader._come)("reader", CPU)
    transport.open("owner", 1, handle, Deadline(10))
    region = transport.register([torch.zeros(25, dtype=torch.uint8)])
    plan = transport.prepare(region, [Copy("owner", 0, 0, 0, 0, 25)])

    def passes(count: int) -> None:
        for _ in range(count):
            operation = transport.submit(plan)
            assert transport.poll(operation).done
            transport.poll(operation)  # which brings nothing more

    passes(4)
    reader.die_after(0.5)
    passes(1)
    assert killed == []
    passes(1)
    assert set(killed) == {9}


class _Member:
    """A stand-in for a process: a reader cannot be made to receive what is wrong."""

    def __init__(self, content: str, told: int = 0) -> None:
        self._answers = {"content": content, "delivered": told}

    def call(self, method: str, *args: Any) -> Any:
        if method == "receive":
            raise PeerDead("it has gone")
        return self._answers[method]

    def was_killed(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("contents", "told", "right"),
    [("aa", 2, True), ("ab", 2, False), ("bb", 2, False), ("aa", 3, False)],
    ids=["right", "one is wrong", "both are", "another one has told"],
)
def test_what_is_right(tmp_path: Path, contents: str, told: int, right: bool) -> None:
    with Fleet(tmp_path, backend="rdma", readers=2, nbytes=1, tensors=1) as fleet:
        fleet._owner = _Member("a", told)  # type: ignore[assignment]
        readers: Any = [_Member(content) for content in contents]
        assert fleet.is_right(readers) is right


def test_a_reader_that_ends_in_another_way_is_no_death() -> None:
    reader: Any = _Member("a")
    with pytest.raises(PeerDead):
        _span(reader, "receive", ())


# -- the command -----------------------------------------------------------------------------------


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    children = resources()["children"]
    code = main(SMALL)
    said = capsys.readouterr()
    assert said.err == ""
    summary, line = said.out.splitlines()
    found = json.loads(line)
    assert code == (0 if found["ok"] else 1)
    assert summary.startswith("2 readers of 0.02 GiB: ")
    assert (found["name"], found["unit"], found["bound"]) == ("fleet", "s", 1.15)
    assert {key: len(each) for key, each in found["samples"].items()} == {
        "ours_s": 2,
        "baseline_s": 2,
        "without_digests_s": 2,
        "undisturbed_others_s": 6,
        "disturbed_others_s": 2,
    }
    details = found["details"]
    assert (details["checked"], details["deaths"]) == (True, 2)
    assert (details["backend"], details["readers"], details["tensors"]) == ("rdma", 2, 9)
    assert resources()["children"] == children


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_backends_without_such_reads(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--backend", backend]) == 1
    assert "has no reads by many" in capsys.readouterr().err


def test_more_than_there_is_memory_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--gib", "1024"]) == 1
    assert "There is no memory for 2 readers" in capsys.readouterr().err


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "fleet", *arguments])


def test_arguments() -> None:
    defaults = _parsed()
    assert (defaults.backend, defaults.readers, defaults.gib) == ("rdma", 4, 1.0)
    assert (defaults.rounds, defaults.deaths, defaults.json) == (7, 3, False)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--readers", "1", "at least 2"),
        ("--gib", "0", "not between"),
        ("--gib", "nan", "not between"),
        ("--gib", "much", "no number"),
    ],
)
def test_what_is_no_argument(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parsed(option, value)
    assert why in capsys.readouterr().err
