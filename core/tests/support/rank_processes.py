"""Two processes that share a gloo group and are told what to do, line by line."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

LIMIT_S = 60
"""Seconds until a process that does not answer fails the test."""


class RankProcess:
    """A process that does what it is told.

    Args:
        script: Its program, in this folder.
        rank: Of the two.
        file: Where they meet.
    """

    def __init__(self, script: str, rank: int, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), str(rank), str(file)],
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

    def answer(self) -> Any:
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
def two_processes(script: str, folder: Path) -> Iterator[list[RankProcess]]:
    """Both ranks of a new group."""
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            processes.append(RankProcess(script, rank, folder / "rendezvous"))
            stack.callback(processes[-1].close)
        yield processes
