"""Calls that may never return, made so that nobody has to wait for them."""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

_Calls: TypeAlias = "SimpleQueue[_Call | None]"


@dataclass(eq=False)
class _Call:
    """A call on its way, and whether it has come back; its future can be given up before."""

    function: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)
    has_returned: bool = False

    def make(self) -> None:
        # Not held any longer: it may hold whoever has the caller.
        function, self.function = self.function, None
        assert function is not None
        try:
            result = function()
            del function
        except BaseException as error:
            self.has_returned = True
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)
        else:
            self.has_returned = True
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(result)


class Caller:
    """Makes calls on a thread, kept for the next call: to start one takes as long as a short call.
    Any thread may ask for one.

    A call that never returns keeps nobody waiting, not even at exit; the next one has a new thread.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: _Calls | None = None
        self._last: _Call | None = None

    def __call__(self, function: Callable[[], Any]) -> Future[Any]:
        """Its result."""
        with self._lock:
            if self._calls is not None and self.is_stuck:
                self._calls.put(None)  # it ends when it can
                self._calls = None
            if self._calls is None:
                self._calls = SimpleQueue()
                weakref.finalize(self, self._calls.put, None)
                threading.Thread(
                    target=_make_calls, args=(self._calls,), name=self._name, daemon=True
                ).start()
            call = self._last = _Call(function)
            self._calls.put(call)
        return call.future

    @property
    def is_stuck(self) -> bool:
        """Whether the last call has not come back yet."""
        return self._last is not None and not self._last.has_returned

    @property
    def last(self) -> Future[Any] | None:
        """Of the last call, which an interrupt may have kept from whoever asked for it."""
        return None if self._last is None else self._last.future


def has_ended(future: Future[Any], seconds: float) -> bool:
    """Whether a call has, which is waited for so long at most."""
    with suppress(concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
        future.exception(seconds)
    return future.done()


def _make_calls(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # nothing is held until the next one
