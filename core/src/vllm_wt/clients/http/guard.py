"""A limit on the whole of a call: httpx limits each read and each write of it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import httpx
from typing_extensions import Self


class Guard:
    """Cuts the connection of a call at its deadline, whatever the call is doing then.

    Args:
        seconds: From entering it.
    """

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._done = False
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()  # of the three above
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._expire)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._done = True
            if self._connection is not None:
                self._connection.close()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx's hook: get hold of the connection as soon as there is one."""
        if event != "connection.connect_tcp.complete":
            return
        # A copy, because TLS detaches the one that it wraps; both are one connection.
        try:
            copy = info["return_value"].get_extra_info("socket").dup()
        except OSError as error:  # too many open files
            raise httpx.ConnectError(str(error)) from error
        with self._lock:
            self._connection = copy
            if self.expired:
                self._cut()

    def _expire(self) -> None:
        with self._lock:
            if not self._done:
                self.expired = True
                self._cut()

    def _cut(self) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the server was faster
                self._connection.shutdown(socket.SHUT_RDWR)
