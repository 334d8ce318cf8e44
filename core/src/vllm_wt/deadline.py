"""One deadline for a whole phase, handed down to every wait in it."""

from __future__ import annotations

import math
import numbers
import threading
import time
from typing import Any

from vllm_wt.errors import Aborted, InvalidInfo, Timeout, shown

INIT_S = 60.0
"""Default seconds for rendezvous and set-up."""
ROUND_S = 300.0
"""Default seconds for one whole round."""
MAX_S = 86400
"""Most seconds that a deadline may have."""


class Deadline:
    """A point in time on the monotonic clock, which another thread may bring forward to now.

    Args:
        seconds: Seconds from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._cancelled = threading.Event()
        self._reason = ""

    def cancel(self, reason: str) -> None:
        """End every wait under this deadline soon; thread-safe."""
        self._reason = reason
        self._cancelled.set()

    def remaining(self) -> float:
        """Seconds left, never negative; 0 when cancelled."""
        return 0.0 if self._cancelled.is_set() else max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining() <= 0

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the deadline, nor once it is cancelled."""
        self._cancelled.wait(min(seconds, self.remaining()))

    def check(self, what: str, *, where: str | None = None, got: object = None) -> None:
        """Raise once the deadline has passed or was cancelled.

        Raises:
            Timeout: It has passed.
            Aborted: It was cancelled.
        """
        if self._cancelled.is_set():
            raise Aborted(
                f"Given up: {self._reason}",
                where=where,
                got=got,
                cure="push again; what was under way has changed nothing",
            )
        if self.expired:
            raise Timeout(
                what,
                where=where,
                expected=f"within {self.seconds:g} s",
                got=got,
                cure="look for a stopped or dead peer; raise deadline_s if the transfer is just slow",
            )


def asked_for(value: Any) -> Deadline:
    """A caller's ``deadline_s``, which begins now.

    Args:
        value: Seconds, as a number of any library.

    Raises:
        InvalidInfo: It makes no sense.
    """
    try:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        seconds = float(value) if real else math.nan
    except (OverflowError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= MAX_S:
        raise InvalidInfo(
            "This cannot be a deadline",
            where="deadline_s",
            expected=f"seconds, more than 0 and at most {MAX_S}",
            got=shown(value),
            cure="leave it out for the default",
        )
    return Deadline(seconds)
