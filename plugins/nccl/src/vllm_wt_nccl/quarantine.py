"""Communicators of this process that were given up, until nothing of theirs is in use any more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from vllm_wt_nccl.communicator import Communicator

_LOOK_S = 0.1
"""Seconds between two looks at whether one can be closed."""


class _Quarantine:
    """Those that could not be closed at once, with a thread as long as there are any."""

    def __init__(self) -> None:
        self._held: list[Communicator] = []
        self._lock = threading.Lock()
        self._closing: threading.Thread | None = None

    def add(self, communicator: Communicator) -> None:
        with self._lock:
            self._held.append(communicator)
            if self._closing is None or not self._closing.is_alive():  # as after a fork
                self._closing = threading.Thread(
                    target=self._close, name="vllm-wt-quarantine", daemon=True
                )
                self._closing.start()

    def _close(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                held = list(self._held)
            closed = [each for each in held if each.close()]
            with self._lock:
                self._held = [each for each in self._held if each not in closed]
                if not self._held:
                    self._closing = None
                    return


_quarantine = _Quarantine()


def give_up(communicator: Communicator) -> bool:
    """Close one, now or as soon as that can be; whether nothing is written to its buffers any more."""
    if communicator.close():
        return True
    _quarantine.add(communicator)
    return False


def give_up_when_made(making: Future[Communicator]) -> None:
    """Close one that nobody waits for any more, should it come after all."""

    def come(made: Future[Communicator]) -> None:
        if not made.cancelled() and made.exception() is None:
            give_up(made.result())

    making.add_done_callback(come)
