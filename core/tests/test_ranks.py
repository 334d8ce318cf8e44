"""Workers agree over a real gloo group of two processes."""

import json

import pytest

from vllm_wt.errors import PeerDead, WeightTransferError, from_facts
from vllm_wt.ranks import Report, SingleRank

from .support.rank_processes import LIMIT_S, RankProcess, two_processes

SCRIPT = "rank_process.py"


def _begin(process: RankProcess, error: object = None, *, seconds: float = 30) -> None:
    """One exchange."""
    process.tell(error=error, seconds=seconds)


def _new_group(processes: list[RankProcess], group_s: float = 2 * LIMIT_S) -> list[RankProcess]:
    for process in processes:
        process.tell(group_s=group_s)
    assert [process.answer() for process in processes] == [[0, 2], [1, 2]]
    return processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with two_processes(SCRIPT, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture
def group(processes):
    """A new group: what an earlier test left pending is in another one."""
    return _new_group(processes)


def _facts(text: str) -> dict:
    """The longest facts that an error of one rank can have, made of ``text``."""
    return PeerDead(
        text,
        **dict.fromkeys(("where", "expected", "got", "cure", "backend"), text),
    ).facts()


def test_reports_come_back_by_rank(group):
    zero, one = group
    steps = [
        [None, None],
        [None, _facts("gone")],
        [_facts("x" * 1000), _facts("y" * 1000)],
    ]
    for step in steps:
        for process, error in zip((one, zero), reversed(step), strict=True):
            _begin(process, error)
        assert zero.answer() == {"reports": step}
        assert one.answer() == {"reports": step}


def test_error_that_does_not_fit_keeps_its_class_and_its_sentence(group):
    zero, one = group
    text = "no bytes: " + "\N{DELIVERY TRUCK}" * 1000  # 12 bytes each, as JSON
    facts = _facts(text)
    assert len(json.dumps(facts)) > 16384
    _begin(zero, facts)
    _begin(one)
    [mine, other] = zero.answer()["reports"]
    assert one.answer()["reports"] == [mine, other]
    assert other is None
    rebuilt = from_facts(mine)
    assert type(rebuilt) is PeerDead
    assert rebuilt.what == facts["what"]


@pytest.mark.parametrize("seconds", [0.5, 0.0], ids=["some", "none left"])
def test_missing_rank_is_a_timeout(group, seconds):
    zero, _ = group
    _begin(zero, seconds=seconds)
    answer = zero.answer()  # the group's own timeout is longer than this waits
    assert answer["raised"] == "Timeout"
    assert answer["says"] == (
        "The ranks of the engine could not agree: Operation timed out!. "
        f"Where: rank 0 of 2. Expected: an answer of every rank within {seconds:g} s. "
        "Cure: a worker process is stopped or dead: restart the engine."
    )


def test_timeout_of_the_group_itself(processes):
    zero, _ = _new_group(processes, group_s=1)
    _begin(zero, seconds=LIMIT_S)
    answer = zero.answer()
    assert answer["raised"] == "Timeout"
    assert "Timed out waiting 1000ms" in answer["says"]


def test_dead_rank_is_a_broken_group(tmp_path):
    with two_processes(SCRIPT, tmp_path) as processes:
        zero, one = _new_group(processes)
        one.process.kill()
        one.process.wait(LIMIT_S)
        _begin(zero)
        answer = zero.answer()
    assert answer["raised"] == "TransportError"
    assert "by peer" in answer["says"]  # closed or reset, as the kernel has it
    assert "Where: rank 0 of 2." in answer["says"]


def test_late_rank_gets_the_report_that_was_meant_for_it(group):
    zero, one = group
    _begin(zero, _facts("first"), seconds=0.5)
    assert zero.answer()["raised"] == "Timeout"
    _begin(one)
    assert one.answer() == {"reports": [_facts("first"), None]}


def test_single_rank_hears_itself():
    ranks = SingleRank()
    report = Report(WeightTransferError("It broke").facts())
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.exchange(report, 0.0) == [report]
