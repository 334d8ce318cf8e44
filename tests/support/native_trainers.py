"""Trainer processes in vLLM's own form, as the tests see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_wt.errors import from_facts
from vllm_wt.testing.models import ModelShape

SCRIPT = Path(__file__).with_name("wt_native_trainer.py")


class NativeTrainer:
    """A trainer process; what is begun is answered by it or raises its typed error.

    Args:
        folder: For its checkpoints.
        shape: Of its model.
        device: Of its model; NCCL takes its host for another one than the engine's.
    """

    def __init__(self, folder: Path, shape: ModelShape, device: str = "cpu") -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps([str(folder), asdict(shape), device])],
            env=os.environ | {"NCCL_HOSTID": "trainer"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, method: str, *arguments: Any, **keywords: Any) -> None:
        assert self._process.stdin is not None
        line = json.dumps([method, arguments, keywords])
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise from_facts(answer["error"])
        return answer["result"]

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        self.begin(method, *arguments, **keywords)
        return self.answer()

    def stop(self) -> None:
        """Stop the process, as a debugger or a frozen host would."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
