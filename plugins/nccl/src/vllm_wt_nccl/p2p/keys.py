"""A store for a pair's library to set itself up by, which goes over the connection of the pair.

So it needs no port of its own, answers nobody else, and ends with the connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt_nccl.p2p.messages import Key

_MOST_KEYS = 256
_MOST_KEY = 1 << 8
_MOST_VALUE = 1 << 16
"""Bytes, and keys, that a peer may leave: gloo leaves a few hundred bytes under each of a few."""


class ConnectionStore(Store):
    """One side's.

    Args:
        say: Has a key told to the other side; called by any thread.
        seconds: That a key is waited for.
    """

    def __init__(self, say: Callable[[Key], None], seconds: float) -> None:
        super().__init__()
        self._say = say
        self._end = time.monotonic() + seconds
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    # What torch calls, on the thread that makes the pair.

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = data
        self._say(Key(key, data))

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._values or self._closed,
                max(0.0, self._end - time.monotonic()),
            )
            if key not in self._values:
                why = "closed" if self._closed else "timed out"
                raise RuntimeError(f"the connection of the pair {why} before {key!r} had come")
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            if self._closed:
                raise RuntimeError("the connection of the pair closed")
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout  # the seconds that it was made with are for all of it
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: timedelta) -> None:
        del timeout

    # What the connection's side calls.

    def take_in(self, told: Key) -> bool:
        """Note what the other side has left; whether that makes sense."""
        with self._changed:
            if (
                len(self._values) >= _MOST_KEYS
                or len(told.key) > _MOST_KEY
                or len(told.value) > _MOST_VALUE
            ):
                return False
            self._values[told.key] = told.value
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """No key comes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
