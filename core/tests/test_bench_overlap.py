"""``vllm-wt bench overlap`` and its slow wire, without an engine; tests/e2e runs the command."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from vllm_wt.cli import bench
from vllm_wt.cli.bench_overlap import _result
from vllm_wt.cli.bench_overlap_trainer import expected, sha256
from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo
from vllm_wt.testing import throttled
from vllm_wt.testing.throttled import rate_of
from vllm_wt.transport import Copy, Progress

from .conftest import MemoryTransport

NBYTES = 1000
CPU = torch.device("cpu")


class Clock:
    """Seconds, as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def passing(transport_cls: type[MemoryTransport], clock: Clock) -> Any:
    """A reader on a wire of 100 bytes a second, a plan of 1000 bytes, their source and their target."""
    owner = transport_cls("owner", CPU)
    source = torch.arange(NBYTES).to(torch.uint8)
    handle = owner.expose(owner.register([source]), 1)
    reader = throttled.throttled(transport_cls, 100.0, clock)("reader", CPU)
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    reader.open("owner", 1, handle, Deadline(10))
    plan = reader.prepare(reader.register([target]), [Copy("owner", 0, 0, 0, 0, NBYTES)])
    return reader, plan, source, target


def test_a_pass_is_not_done_before_its_bytes_would_have_come(passing: Any, clock: Clock) -> None:
    reader, plan, source, target = passing
    operation = reader.submit(plan)
    for now, come in ((0.0, 0), (2.5, 250), (9.99, 999)):
        clock.now = now
        assert reader.poll(operation) == Progress(False, come)
    clock.now = 10.0
    assert reader.poll(operation) == Progress(True, NBYTES)
    assert torch.equal(target, source)


def test_each_pass_takes_its_time(passing: Any, clock: Clock) -> None:
    reader, plan, source, target = passing
    clock.now = 100.0
    reader.poll(reader.submit(plan))
    source.neg_()
    again = reader.submit(plan)
    assert not reader.poll(again).done
    clock.now = 110.0
    assert reader.poll(again) == Progress(True, NBYTES)
    assert torch.equal(target, source)


def test_the_real_transport_is_driven_no_faster(
    transport_cls: type[MemoryTransport], clock: Clock
) -> None:
    """A stand-in: it brings 400 bytes a poll."""
    polls = []

    class Chunks(transport_cls):  # type: ignore[misc,valid-type]
        def submit(self, plan: Any) -> Any:
            return "its own"

        def poll(self, operation: Any) -> Progress:
            polls.append(operation)
            return Progress(len(polls) == 3, min(NBYTES, 400 * len(polls)))

    reader = throttled.throttled(Chunks, 100.0, clock)("reader", CPU)
    operation = reader.submit(None)
    seen = []
    for second in range(11):
        clock.now = float(second)
        seen.append((reader.poll(operation).nbytes, len(polls)))
    assert polls == ["its own"] * 3
    assert seen == [
        *((100 * s, 1) for s in range(4)),
        *((100 * s, 2) for s in range(4, 8)),
        *((100 * s, 3) for s in range(8, 11)),
    ]


def test_a_pass_is_cancelled_as_the_real_transport_does(passing: Any, fabric: Any) -> None:
    reader, plan, *_ = passing
    operation = reader.submit(plan)
    assert reader.cancel(operation) is True
    fabric.quiesces = False
    assert reader.cancel(operation) is False


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InvalidInfo, match="no rate") as error:
        rate_of(text)
    assert (error.value.where, error.value.got) == (throttled.RATE, repr(text))
    assert error.value.cure


def test_a_rate_is_in_megabytes() -> None:
    assert rate_of("") is None
    assert rate_of("0.5") == 500_000


# -- the command -----------------------------------------------------------------------------------


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "overlap", *arguments])


def test_arguments() -> None:
    defaults = _parsed()
    assert (defaults.megabytes, defaults.rounds, defaults.json) == (400, 7, False)
    given = _parsed("--megabytes", "200", "--rounds", "3", "--json")
    assert (given.megabytes, given.rounds, given.json) == (200, 3, True)


def test_no_rounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parsed("--rounds", "0")
    assert "0 is less than 1" in capsys.readouterr().err


STAGES = ("start", "wire", "verify", "load", "confirm", "stop", "resume")
ROUND = {
    "nbytes": 400_000_000,
    "stages": dict.fromkeys(STAGES, 0.002) | {"wire": 2.0},
    "paused_s": 0.15,
    "empty_s": [0.09, 0.1, 0.5],
    "copy_s": 0.04,
    "stall_s": 0.6,
    "empty_stall_s": [0.5, 0.55, 0.6],
    "tokens_s_before": 50.0,
    "tokens_s_during": 40.0,
    "right": True,
}


def test_result() -> None:
    result = _result([ROUND] * 3, {"vllm": "0"})
    assert list(result) == [
        "name", "value", "baseline", "unit", "ratio", "bound", "ok", "samples", "details",
    ]  # fmt: skip
    assert (result["name"], result["value"], result["baseline"]) == ("overlap", 50.0, 40.0)
    assert (result["unit"], result["ratio"], result["bound"]) == ("ms", 1.25, 1.5)
    assert result["ok"] is True
    assert result["details"]["wire_mb_s"] == 200.0
    assert result["details"]["tokens_ratio"] == 0.8
    assert result["details"]["stages_ms"]["load"] == 2.0


@pytest.mark.parametrize(
    "change", [{"paused_s": 0.17}, {"tokens_s_during": 24.0}, {"right": False}], ids=str
)
def test_what_is_not_ok(change: dict[str, Any]) -> None:
    assert _result([ROUND | change] * 3, {})["ok"] is False


def test_one_round_with_wrong_weights_is_enough() -> None:
    assert _result([ROUND, ROUND, ROUND | {"right": False}], {})["ok"] is False


def test_what_the_model_must_hold() -> None:
    tensors = {
        f"a.{name}.weight": torch.full((2, 3), float(number))
        for number, name in enumerate(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
        )
    }
    found = expected(tensors)
    q, k, v, o, gate, up = tensors.values()
    assert found == {
        "a.qkv_proj.weight": sha256([torch.cat([q, k, v])]),
        "a.gate_up_proj.weight": sha256([torch.cat([gate, up])]),
        "a.o_proj.weight": sha256([o]),
    }
