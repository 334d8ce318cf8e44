"""Peers in processes of their own."""

from __future__ import annotations

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

from vllm_wt.errors import from_facts

_SCRIPT = Path(__file__).with_name("peer_process.py")


class PeerProcess:
    """The test's end of a peer.

    Args:
        device: Of its buffers.
        environment: What it has beyond this process's.
    """

    def __init__(self, device: str = "cpu", **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def begin(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Of the call that was begun; raises its typed error."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise from_facts(answer["error"])
        return answer["result"]

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.answer()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def leave(self, seconds: float) -> None:
        """It is told no more, at which it ends, within so many seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(seconds) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., PeerProcess]]:
    """Makes peers, which end with the test."""
    made: list[PeerProcess] = []

    def make(device: str = "cpu", **environment: str) -> PeerProcess:
        made.append(PeerProcess(device, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()
