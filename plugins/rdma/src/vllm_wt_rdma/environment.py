"""Settings of UCX, which takes them from the environment alone, for what is made within a block."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Have a variable of the environment set in here, or unset by None, and afterwards as it was:
    other users of UCX, in this process or started by it, are not to find settings of ours."""
    with _lock:
        before = os.environ.get(name)
        _set(name, value)
        try:
            yield
        finally:
            _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
