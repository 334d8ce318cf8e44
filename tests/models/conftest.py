"""Real vLLM models in processes of their own, and checkpoints for them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zoo import FAMILIES

SCRIPT = Path(__file__).parents[1] / "support" / "wt_model_rank.py"

COMES_UP_S = 90.0
"""Importing vLLM takes seconds, and more of them where the machine is busy or its files are cold."""
ANSWERS_S = 30.0
LEFT_ALONE_S = 5.0
"""A rank whose peer has failed may wait for it forever."""


class Forker:
    """The process that has vLLM imported; it ends when its input does."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "forker.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )

    def fork(self, *arguments: Any) -> int:
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            assert ready.select(COMES_UP_S), f"nothing after {COMES_UP_S} s"
        said = self._process.stdout.readline()
        assert said, Path(self._log.name).read_text()
        return int(said)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


class Ranks:
    """The processes of one tensor-parallel group, which take one family after another."""

    def __init__(self, forker: Forker, folder: Path, tp: int, unpacked: bool) -> None:
        self._folder = folder
        self._pids: list[int] = []
        self._ranks: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "ranks.sock"))
            listener.listen()
            listener.settimeout(COMES_UP_S)
            for rank in range(tp):
                self._pids.append(forker.fork(str(folder), rank, tp, unpacked))
            for _ in range(tp):
                connection, _ = listener.accept()
                connection.settimeout(COMES_UP_S)
                self._ranks[int(_line(connection))] = connection

    @property
    def alive(self) -> bool:
        return bool(self._pids)

    def ask(self, *question: Any) -> list[dict[str, Any]]:
        """Every rank's answer to the same question; the failure of any fails the test."""
        for connection in self._ranks.values():
            connection.sendall(json.dumps(question).encode() + b"\n")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + ANSWERS_S
        with selectors.DefaultSelector() as ready:
            for rank, connection in self._ranks.items():
                ready.register(connection, selectors.EVENT_READ, rank)
            while len(answers) < len(self._ranks):
                events = ready.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    break
                for key, _ in events:
                    said = _line(self._ranks[key.data])
                    answers[key.data] = json.loads(said) if said else {"traceback": "it ended"}
                    ready.unregister(key.fileobj)
                    if "traceback" in answers[key.data]:
                        deadline = min(deadline, time.monotonic() + LEFT_ALONE_S)
        failed = {
            rank: answer["traceback"] for rank, answer in answers.items() if "traceback" in answer
        }
        silent = [rank for rank in self._ranks if rank not in answers]
        if failed or silent:
            for rank in silent:
                self._show_stack(rank)
                failed[rank] = "no answer, see its stack below"
            self.close()
            pytest.fail("\n".join(self._account(rank, failed[rank]) for rank in sorted(failed)))
        return [answers[rank] for rank in sorted(answers)]

    def _show_stack(self, rank: int) -> None:
        """Let it write its stack, all of it, into its log."""
        log = self._folder / f"rank{rank}.log"
        before = log.stat().st_size
        os.kill(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + LEFT_ALONE_S
        while "in fork_ranks" not in log.read_text()[before:] and time.monotonic() < deadline:
            time.sleep(0.02)

    def _account(self, rank: int, traceback: str) -> str:
        log = (self._folder / f"rank{rank}.log").read_text()[-2000:]
        return f"rank {rank}: {traceback}\nits output ends with:\n{log}"

    def close(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._ranks.values():
            connection.close()
        self._pids, self._ranks = [], {}
        # Nothing that was killed has taken vLLM's shared memory away.
        for segment in Path("/dev/shm").glob(f"{self._folder.name}-*"):
            segment.unlink()


def _line(connection: socket.socket) -> bytes:
    """All up to the end of the line, or what there is of it where the other side has ended."""
    said = b""
    while not said.endswith(b"\n"):
        try:
            part = connection.recv(1 << 16)
        except ConnectionError:
            part = b""
        if not part:
            break
        said += part
    return said


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, bool], Ranks]]:
    """``ranks(tp, unpacked)``: one group for all tests; a new one where a test has ended it."""
    forker = Forker(tmp_path_factory.mktemp("forker"))
    groups: dict[tuple[int, bool], Ranks] = {}

    def get(tp: int, unpacked: bool) -> Ranks:
        group = groups.get((tp, unpacked))
        if group is None or not group.alive:
            # Of the folder's name vLLM makes names that the whole host sees.
            folder = tmp_path_factory.mktemp(f"ranks-{uuid.uuid4().hex[:8]}", numbered=False)
            group = groups[tp, unpacked] = Ranks(forker, folder, tp, unpacked)
        return group

    yield get
    for group in groups.values():
        group.close()
    forker.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """``checkpoint(family, seed)``: a folder."""
    folder = tmp_path_factory.mktemp("zoo")
    return lambda name, seed: FAMILIES[name].save(folder / f"{name}-{seed}", seed)
