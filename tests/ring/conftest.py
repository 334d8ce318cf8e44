"""Trainer ranks and readers in processes of their own; the test tells each what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import PeerDead

SCRIPT = Path(__file__).parents[1] / "support" / "wt_ring.py"
LONG_S = 60.0
"""Seconds after which what a test waits for is taken not to come; far below the ranks' own timeout."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """What it returns, once that is something."""
    end = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


class Process:
    """One of them, by a socket of its own."""

    def __init__(self, pid: int, path: Path) -> None:
        self.pid = pid
        self.path = path
        self._client: RelayClient | None = None

    def call(self, method: str, *args: Any) -> Any:
        if self._client is None:
            self._client = until(self._connected, "a process to answer")
        return self._client.call(method, *args)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stopped(self) -> bool:
        return self._state() == "T"

    def dead(self) -> bool:
        return self._state() is None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        if self._client is not None:
            self._client.close()

    def _state(self) -> str | None:
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return text.rpartition(")")[2].split()[0]

    def _connected(self) -> RelayClient | None:
        assert not self.dead(), "the process has ended"
        try:
            return RelayClient(self.path, timeout_s=LONG_S)
        except PeerDead:
            return None


class Forker:
    """Where processes come from."""

    def __init__(self, folder: Path, script: Path = SCRIPT) -> None:
        self._folder = folder
        self._processes: list[Process] = []
        self._trainers: dict[int, Trainer] = {}
        self._parent = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # glibc gives what is above back at once, so that what is measured is what is held.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        )

    def fork(self, role: str, *arguments: Any) -> Process:
        path = self._folder / str(len(self._processes))
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps([role, str(path), *arguments]), file=self._parent.stdin, flush=True)
        process = Process(int(self._parent.stdout.readline()), path)
        self._processes.append(process)
        return process

    def idle_trainer(self, world: int) -> Trainer:
        """One of an earlier test, unless that has failed and left a rank in a collective."""
        kept = self._trainers.get(world)
        if kept is None or not kept.idle():
            if kept is not None:
                kept.close()
            kept = self._trainers[world] = self.trainer(world)
        return kept

    def trainer(self, world: int) -> Trainer:
        store = str(self._folder / f"store{len(self._processes)}")
        return Trainer([self.fork("rank", rank, world, store) for rank in range(world)])

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._parent.communicate()


class Trainer:
    """All ranks of one; the first has the session."""

    def __init__(self, ranks: list[Process]) -> None:
        self.ranks = ranks
        self.first = ranks[0]
        self.version = 0

    def all(self, method: str, *args: Any) -> list[Any]:
        """Of each rank, at the same time."""
        for rank in self.ranks:
            rank.call("launch", method, *args)
        return [self._result(rank) for rank in self.ranks]

    def connect(self, reader: Process, bucket_nbytes: int, **options: Any) -> Any:
        """No other rank takes part."""
        self.version = 0
        return self.first.call("connect", str(reader.path), bucket_nbytes, *options.values())

    def start_push(self, deadline_s: float = 30.0) -> None:
        """The first pushes the next version, the others take part."""
        self.version += 1
        for rank in self.ranks[1:]:
            rank.call("launch", "take_part")
        self.first.call("launch", "push", self.version, deadline_s)

    def push(self) -> Any:
        """One that succeeds."""
        self.start_push()
        results = [self._result(rank) for rank in self.ranks]
        assert self.first.call("versions") == [[self.version, False]]
        return results[0]

    def idle(self) -> bool:
        return all(rank.call("outcome") is not None for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def failure(self) -> Any:
        """Of the push that was started; all other ranks have walked to their end."""
        outcome = self._outcome(self.first)
        for rank in self.ranks[1:]:
            assert self._outcome(rank) == {"result": None}
        return outcome["error"]

    def _result(self, rank: Process) -> Any:
        outcome = self._outcome(rank)
        assert "error" not in outcome, outcome
        return outcome["result"]

    @staticmethod
    def _outcome(rank: Process) -> Any:
        return until(lambda: rank.call("outcome"), "the end of a call")


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("ring"))
    yield forker
    forker.close()


@pytest.fixture(params=[2, 3], ids=["two ranks", "three ranks"])
def trainer(request: pytest.FixtureRequest, forker: Forker) -> Trainer:
    return forker.idle_trainer(request.param)


@pytest.fixture
def new_reader(forker: Forker) -> Iterator[Callable[[], Process]]:
    """Makes readers; those of a test end with it."""
    made = []

    def new() -> Process:
        made.append(forker.fork("reader"))
        made[-1].call("digests")
        return made[-1]

    yield new
    for reader in made:
        reader.close()


@pytest.fixture
def reader(new_reader: Callable[[], Process]) -> Process:
    return new_reader()
