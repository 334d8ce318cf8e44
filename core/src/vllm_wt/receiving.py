"""The thread on which an engine receives, so that the worker's main thread can end its wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError

logger = logging.getLogger(__name__)

ABORT_S = 10.0
"""Seconds that a call which was aborted may take to return."""


class Receive:
    """One call of an engine's, on its own thread unless it is to be run here."""

    def __init__(
        self,
        run: Callable[[], None],
        context: Callable[[], AbstractContextManager[Any]],
        deadline: Deadline,
        *,
        here: bool = False,
    ) -> None:
        self.deadline = deadline
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if here:
            self._main(run, context)
            return
        self._thread = threading.Thread(
            target=self._main, args=(run, context), name="vllm-wt-receive", daemon=True
        )
        self._thread.start()

    def _main(
        self, run: Callable[[], None], context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        try:
            with context():
                run()
        except Exception as error:
            if not isinstance(error, WeightTransferError):
                logger.exception("vllm-wt: receiving failed")
            self.error = _without_frames(error)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


def _without_frames(error: Exception) -> Exception:
    """The same, holding nothing that was in use when it was raised: a trainer's memory, say."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
