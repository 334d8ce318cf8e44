"""Trainer ranks, readers and engines in processes of their own; the test tells each what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wt_ring import digest_of, full_tensors

from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import PeerDead

LONG_S = 60.0
"""Seconds after which what a test waits for is taken not to come; far below the ranks' own timeout."""

LOST = {"E04", "E05", "E06", "E10"}
"""Codes of errors: somebody died, did not come in time, has given up, or is not reached."""


def until(condition: Callable[[], Any], what: str, seconds: float = LONG_S) -> Any:
    """What it returns, once that is something."""
    end = time.monotonic() + seconds
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

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []
        self._parent = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # glibc gives what is above back at once, so that what is measured is what is held.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        )

    def fork(self, role: str, *arguments: Any) -> Process:
        path = self.folder / str(len(self._processes))
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(json.dumps([role, str(path), *arguments]), file=self._parent.stdin, flush=True)
        process = Process(int(self._parent.stdout.readline()), path)
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._parent.communicate()


def digests(seed):
    """The oracle: the tensors before any rank had them."""
    return {
        name: [str(tensor.dtype), list(tensor.shape), digest_of(tensor)]
        for name, tensor in full_tensors("small", seed).items()
    }


class Group:
    """All ranks of a trainer, and its engine."""

    def __init__(self, forker, backend, world, engine, device="cpu"):
        store = str(forker.folder / f"store{len(forker._processes)}")
        self.backend, self.engine = backend, engine
        self.ranks = [forker.fork("rank", rank, world, store, device) for rank in range(world)]

    def start(self, method, *args, ranks=None):
        for rank in self.ranks if ranks is None else ranks:
            rank.call("launch", method, *args)

    def outcomes(self, ranks=None, seconds=LONG_S):
        return [
            until(lambda rank=rank: rank.call("outcome"), "the end of a call", seconds)
            for rank in (self.ranks if ranks is None else ranks)
        ]

    def all(self, method, *args):
        self.start(method, *args)
        outcomes = self.outcomes()
        assert not any("error" in each for each in outcomes), outcomes
        return [each["result"] for each in outcomes]

    def failed(self, ranks=None):
        """The error of each."""
        outcomes = self.outcomes(ranks)
        assert all("error" in each for each in outcomes), outcomes
        assert all(each["error"].get("cure") for each in outcomes), outcomes
        return [each["error"] for each in outcomes]

    def codes(self, ranks=None):
        return [error["code"] for error in self.failed(ranks)]

    def connect(self, **options):
        self.all("connect_together", str(self.engine.path), self.backend, options)
        self.engine.call("calls")

    def push(self, version):
        assert self.all("push_together", version) == [version] * len(self.ranks)

    def assert_pushes(self, version, seed=None):
        """All is well: new values reach every worker."""
        seed = 100 + version if seed is None else seed
        self.all("fill", seed)
        self.push(version)
        self.assert_has(seed)

    def assert_has(self, seed):
        workers = self.engine.call("digests")
        assert workers == [digests(seed)] * len(workers)
