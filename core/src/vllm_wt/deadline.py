"""One deadline for a whole phase, handed down to every wait in it."""

from __future__ import annotations

import time

from vllm_wt.errors import Timeout

INIT_S = 60.0
"""Default seconds for rendezvous and set-up."""
ROUND_S = 300.0
"""Default seconds for one whole round."""


class Deadline:
    """A point in time on the monotonic clock.

    Args:
        seconds: Seconds from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._end

    def check(self, what: str, *, where: str | None = None, got: object = None) -> None:
        """Raise :class:`~vllm_wt.errors.Timeout` once the deadline has passed."""
        if self.expired:
            raise Timeout(
                what,
                where=where,
                expected=f"within {self.seconds:g} s",
                got=got,
                cure="look for a stopped or dead peer; raise deadline_s if the transfer is just slow",
            )
