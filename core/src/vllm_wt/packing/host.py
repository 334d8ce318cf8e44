"""Copies between addresses in this process's memory, over as many threads as torch has.

A call of ``memmove`` costs a fraction of one of torch's, and lets other Python threads run. So threads
of our own call it, started anew in each run: that costs little against what they copy, and nothing is
left running, or missing after a fork.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

_PIECE = 4 << 20
"""Bytes of the largest copy, and of what a thread takes on at once."""
_CALL = 1 << 10
"""Bytes that could be copied in the time that a call takes."""
_SMALL = 8 << 10
"""Up to this size a copy keeps Python's lock: it is shorter than handing the lock over."""

_Move = Callable[[int, int, int], object]


class Run(NamedTuple):
    """A copy of ``nbytes`` bytes between two addresses."""

    to: int
    source: int
    nbytes: int


class HostCopies:
    """Prepared copies of memory; the caller sees to it that it stays where it is.

    Args:
        runs: What to copy, in any order. They may not depend on each other.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._tasks: list[list[tuple[_Move, int, int, int]]] = []
        self._nbytes = 0
        room = 0
        for run in runs:
            for to, source, nbytes in _pieces(run):
                if room < nbytes + _CALL:
                    self._tasks.append([])
                    room = _PIECE + _CALL
                move = _move_locked if nbytes <= _SMALL else _move
                self._tasks[-1].append((move, to, source, nbytes))
                self._nbytes += nbytes
                room -= nbytes + _CALL

    def run(self) -> None:
        """Do them all, and return when they are done. Other Python threads run meanwhile."""
        count = min(torch.get_num_threads(), -(-self._nbytes // _PIECE))
        tasks = iter(self._tasks)
        helpers = [threading.Thread(target=_work, args=(tasks,)) for _ in range(count - 1)]
        started = []
        try:
            for helper in helpers:
                helper.start()
                started.append(helper)
            _work(tasks)
        finally:  # an interrupt: no more is begun, and nothing goes on behind the caller's back
            for _ in tasks:
                pass
            for helper in started:
                helper.join()


def _pieces(run: Run) -> Iterator[Run]:
    for done in range(0, run.nbytes, _PIECE):
        yield Run(run.to + done, run.source + done, min(_PIECE, run.nbytes - done))


def _work(tasks: Iterator[list[tuple[_Move, int, int, int]]]) -> None:
    for task in tasks:
        for move, to, source, nbytes in task:
            move(to, source, nbytes)


def _memmove(library: ctypes.CDLL) -> _Move:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


_move = _memmove(ctypes.CDLL(None))
_move_locked = _memmove(ctypes.PyDLL(None))
