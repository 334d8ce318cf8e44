"""Trainer processes, as the tests see them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import PeerDead
from vllm_wt.testing.models import ModelShape

SCRIPT = Path(__file__).with_name("wt_trainer.py")


class _Forker:
    """The process that forks trainers; it ends with this one, whose end closes its input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fork(self, *arguments: Any) -> int:
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


_forker = lru_cache(maxsize=1)(_Forker)


class Trainer:
    """A trainer process; every call is answered by it or raises its error."""

    def __init__(self, folder: Path, shape: ModelShape, device: str = "cpu") -> None:
        name = f"trainer-{uuid.uuid4().hex[:8]}.sock"
        self.pid = _forker().fork(str(folder), name, asdict(shape), device)
        self._path = folder / name
        self._client: RelayClient | None = None

    def wait_ready(self) -> Trainer:
        """Until it answers: importing torch takes it seconds."""
        self._client = self._connect(self._path)
        return self

    def _connect(self, path: Path) -> RelayClient:
        for _ in range(3000):
            try:
                return RelayClient(path)
            except PeerDead:
                if not self._lives():
                    raise
                time.sleep(0.02)
        raise AssertionError("the trainer process did not come up")

    def call(self, method: str, *args: Any) -> Any:
        assert self._client is not None
        return self._client.call(method, *args)

    def stop(self) -> None:
        """Stop the process, as a debugger or a frozen host would."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not self._lives())

    def close(self) -> None:
        self.kill()
        if self._client is not None:
            self._client.close()

    def _lives(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def in_background(function: Callable[[], Any]) -> Future[Any]:
    """Run it on a thread."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def wait_for(condition: Callable[[], bool]) -> None:
    """Bounded by the test's own timeout."""
    while not condition():
        time.sleep(0.02)
