"""The thread on which an engine receives, while the worker's main thread serves vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_wt.deadline import Deadline


class Receive:
    """One ``receive_weights`` on its own thread."""

    def __init__(
        self,
        run: Callable[[], None],
        context: Callable[[], AbstractContextManager[Any]],
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.error: Exception | None = None
        self._run = run
        self._context = context
        self._thread = threading.Thread(target=self._main, name="vllm-wt-receive", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            with self._context():
                self._run()
        except Exception as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
