"""A push in the background."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from vllm_wt.delivery import Delivery
from vllm_wt.results import PushResult

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Seconds after which an interrupt is noticed that came just before a wait."""


class Publication:
    """A push on a thread of its own.

    Args:
        delivery: The round.
        deliver: Does it.
    """

    def __init__(self, delivery: Delivery, deliver: Callable[[], PushResult]) -> None:
        self.version = delivery.version
        self._delivery = delivery
        self._outcome: Future[PushResult] = Future()
        threading.Thread(
            target=self._main, args=(deliver,), name="vllm-wt-publish", daemon=True
        ).start()

    @property
    def is_over(self) -> bool:
        return self._outcome.done()

    def wait_readers(self) -> None:
        """Wait until nobody reads what was published; raises what the push failed with."""
        while not (self._delivery.is_read.wait(_LOOK_S) or self._outcome.done()):
            pass
        if self._outcome.done():
            self._outcome.result()

    def wait(self) -> PushResult:
        """Wait for its end."""
        while concurrent.futures.wait([self._outcome], _LOOK_S).not_done:
            pass
        return self._outcome.result()

    def give_up(self, reason: str) -> None:
        """End it soon, unless it has; every engine that has not committed keeps its old weights."""
        self._delivery.cancel(reason)
        while concurrent.futures.wait([self._outcome], _LOOK_S).not_done:
            pass

    def _main(self, deliver: Callable[[], PushResult]) -> None:
        try:
            result = deliver()
        except BaseException as error:
            logger.error(
                "vllm-wt: version %d, which was published, failed: %s", self.version, error
            )
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)
