"""Communicators of this process that were given up, until nothing of theirs is in use any more."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from vllm_wt_nccl.communicator import Communicator

_held: list[Communicator] = []
_lock = threading.Lock()


def give_up(communicator: Communicator) -> bool:
    """Close one, now or as soon as that can be; whether nothing is written to its buffers any more."""
    with _lock:
        _held.append(communicator)
    release()
    with _lock:
        return communicator not in _held


def give_up_when_made(making: Future[Communicator]) -> None:
    """Close one that nobody waits for any more, should it come after all."""

    def come(made: Future[Communicator]) -> None:
        if not made.cancelled() and made.exception() is None:
            give_up(made.result())

    making.add_done_callback(come)


def release() -> None:
    """Close those that can be by now."""
    with _lock:
        _held[:] = [each for each in _held if not each.close()]
