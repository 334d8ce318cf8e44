"""Workers agree over a real gloo group of two processes."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from vllm_wt.errors import PeerDead, WeightTransferError, from_facts
from vllm_wt.ranks import Report, SingleRank

SCRIPT = Path(__file__).parent / "support" / "rank_process.py"
LIMIT_S = 60
"""Seconds until a process that does not answer fails the test."""


class RankProcess:
    """A process that makes the exchanges it is told to."""

    def __init__(self, rank: int, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put("")

    def tell(self, **order: object) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def begin(self, error: object = None, *, seconds: float = 30) -> None:
        self.tell(error=error, seconds=seconds)

    def answer(self):
        line = self._said.get(timeout=LIMIT_S)
        assert line, f"the process has ended with {self.process.wait(LIMIT_S)}"
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        self.process.stdout.close()
        with suppress(BrokenPipeError):  # it may not have read everything
            self.process.stdin.close()


@contextmanager
def _processes(folder: Path) -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            processes.append(RankProcess(rank, folder / "rendezvous"))
            stack.callback(processes[-1].close)
        yield processes


def _new_group(processes: list[RankProcess], group_s: float = 2 * LIMIT_S) -> list[RankProcess]:
    for process in processes:
        process.tell(group_s=group_s)
    assert [process.answer() for process in processes] == [[0, 2], [1, 2]]
    return processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with _processes(tmp_path_factory.mktemp("ranks")) as processes:
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
            process.begin(error)
        assert zero.answer() == {"reports": step}
        assert one.answer() == {"reports": step}


def test_error_that_does_not_fit_keeps_its_class_and_its_sentence(group):
    zero, one = group
    text = "no bytes: " + "\N{DELIVERY TRUCK}" * 1000  # 12 bytes each, as JSON
    facts = _facts(text)
    assert len(json.dumps(facts)) > 16384
    zero.begin(facts)
    one.begin()
    [mine, other] = zero.answer()["reports"]
    assert one.answer()["reports"] == [mine, other]
    assert other is None
    rebuilt = from_facts(mine)
    assert type(rebuilt) is PeerDead
    assert rebuilt.what == facts["what"]


@pytest.mark.parametrize("seconds", [0.5, 0.0], ids=["some", "none left"])
def test_missing_rank_is_a_timeout(group, seconds):
    zero, _ = group
    zero.begin(seconds=seconds)
    answer = zero.answer()  # the group's own timeout is longer than this waits
    assert answer["raised"] == "Timeout"
    assert answer["says"] == (
        "The ranks of the engine could not agree: Operation timed out!. "
        f"Where: rank 0 of 2. Expected: an answer of every rank within {seconds:g} s. "
        "Cure: a worker process is stopped or dead: restart the engine."
    )


def test_timeout_of_the_group_itself(processes):
    zero, _ = _new_group(processes, group_s=1)
    zero.begin(seconds=LIMIT_S)
    answer = zero.answer()
    assert answer["raised"] == "Timeout"
    assert "Timed out waiting 1000ms" in answer["says"]


def test_dead_rank_is_a_broken_group(tmp_path):
    with _processes(tmp_path) as processes:
        zero, one = _new_group(processes)
        one.process.kill()
        one.process.wait(LIMIT_S)
        zero.begin()
        answer = zero.answer()
    assert answer["raised"] == "TransportError"
    assert "by peer" in answer["says"]  # closed or reset, as the kernel has it
    assert "Where: rank 0 of 2." in answer["says"]


def test_late_rank_gets_the_report_that_was_meant_for_it(group):
    zero, one = group
    zero.begin(_facts("first"), seconds=0.5)
    assert zero.answer()["raised"] == "Timeout"
    one.begin()
    assert one.answer() == {"reports": [_facts("first"), None]}


def test_single_rank_hears_itself():
    ranks = SingleRank()
    report = Report(WeightTransferError("It broke").facts())
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.exchange(report, 0.0) == [report]
