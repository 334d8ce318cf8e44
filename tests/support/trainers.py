"""Trainer processes, as the tests see them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_wt.clients.relay import RelayClient
from vllm_wt.errors import PeerDead
from vllm_wt.testing.models import ModelShape

SCRIPT = Path(__file__).with_name("wt_trainer.py")


class Trainer:
    """A trainer process; every call is answered by it or raises its error."""

    def __init__(self, folder: Path, shape: ModelShape, device: str = "cpu") -> None:
        name = f"trainer-{uuid.uuid4().hex[:8]}.sock"
        arguments = [str(folder), name, json.dumps(asdict(shape)), device]
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdout=subprocess.DEVNULL,  # UCX logs there
        )
        self._path = folder / name
        self._client: RelayClient | None = None

    def wait_ready(self) -> Trainer:
        """Until it answers: importing torch takes it seconds."""
        self._client = self._connect(self._path)
        return self

    def _connect(self, path: Path) -> RelayClient:
        for _ in range(600):
            try:
                return RelayClient(path)
            except PeerDead:
                if self.process.poll() is not None:
                    raise
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.1)
        raise AssertionError("the trainer process did not come up")

    def call(self, method: str, *args: Any) -> Any:
        assert self._client is not None
        return self._client.call(method, *args)

    def stop(self) -> None:
        """Stop the process, as a debugger or a frozen host would."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if self._client is not None:
            self._client.close()


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
