"""What processes hold at one time, compared with another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_wt.testing.conformance.process import Process

_BOUNDS = {
    "threads": 3,  # some have ended, and their end has not been noticed yet
    "files": 3,  # connections likewise
    "names": 3,
    "children": 0,
    "MiB": 24,  # an allocator keeps some; less than a hundred rounds of our tensors
}
"""How much more may be in use."""
_SOON_S = 3.0
_TURNS = 3
_AGAIN_S = 0.1


class Held:
    """What processes hold, compared with a time before."""

    def __init__(self, *processes: Process) -> None:
        self._processes = processes
        self._before = [process.resources() for process in processes]

    def require_no_more(self, after: str) -> None:
        """At once or soon: a thread that has ended is counted for a moment more."""
        more = self.more()
        assert not more, f"{more} after {after}"

    def more(self) -> str:
        """Which process has more, and what; nothing where none has."""
        for process, before in zip(self._processes, self._before, strict=True):
            end = time.monotonic() + _SOON_S
            while (more := _more(process.resources(), before)) and time.monotonic() < end:
                time.sleep(_AGAIN_S)
            if more:
                return f"{process.title} has {more}"
        return ""


def require_no_more_in_turns(
    processes: Sequence[Process], step: Callable[[], None], after: str
) -> None:
    """See that a step does not leave more behind each time that it is done."""
    found = []
    for _ in range(_TURNS):
        held = Held(*processes)
        step()
        if not (more := held.more()):
            return
        found.append(more)
    raise AssertionError(f"{'; then '.join(found)}, each after {after}")


def _more(now: dict[str, int], before: dict[str, int]) -> str:
    grown = {what: now[what] - before[what] for what in before}
    return ", ".join(
        f"{grown[what]} more {what}" for what, bound in _BOUNDS.items() if grown[what] > bound
    )
