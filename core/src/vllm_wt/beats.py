"""Signs of life between ranks that share a store: who waits for others sees which of them are silent.

A process that has died is noticed by its connections; one that is stopped, or whose host is gone, by
nothing but its silence.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, ClassVar

from vllm_wt.errors import PeerDead

_LONGEST_S = 1.0
"""Most seconds that count between two looks: this process may have been stopped itself."""


class _Heard:
    """The last beats, by the thread that looks for them while somebody waits.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.keys = [f"beat/{rank}" for rank in range(size)]
        self.beats = [b""] * size
        self.is_awaited = False
        self.is_over = threading.Event()


class Beats:
    """This rank's own, and what is heard of the others.

    Args:
        store: That the ranks share. Where it can be, it is asked through a connection of its own:
            others may wait for a key by the one that is given.
        rank: This one.
        size: Number of ranks.
    """

    every_s: ClassVar[float] = 2.0
    """Seconds between two of a rank's."""
    silence_s: ClassVar[float] = 30.0
    """Seconds without one, after which a rank that is waited for is given up."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._rank = rank
        self._heard = _Heard(size)
        self._last = list(self._heard.beats)
        self._silent_s = [0.0] * size
        self._looked = 0.0
        self._end = weakref.finalize(self, self._heard.is_over.set)
        threading.Thread(
            target=_beat,
            args=(store, rank, self._heard, self.every_s),
            name="vllm-wt-beats",
            daemon=True,  # a store that does not answer keeps it
        ).start()

    def begin(self) -> None:
        """This rank waits for the others, from now on."""
        self._silent_s = [0.0] * len(self._silent_s)
        self._looked = time.monotonic()
        self._heard.is_awaited = True

    def check(self, where: str) -> None:
        """To be called again and again while it waits.

        Raises:
            PeerDead: Some have been silent for too long.
        """
        now, beats = time.monotonic(), list(self._heard.beats)
        passed, self._looked = min(now - self._looked, _LONGEST_S), now
        for rank, (last, beat) in enumerate(zip(self._last, beats, strict=True)):
            self._silent_s[rank] = self._silent_s[rank] + passed if beat == last else 0.0
        self._last = beats
        silent = [
            str(rank)
            for rank, seconds in enumerate(self._silent_s)
            if seconds > self.silence_s and rank != self._rank
        ]
        if silent:
            raise PeerDead(
                "Ranks of the trainer are silent, or the store that they share is",
                where=where,
                expected=f"a sign of life from each within {self.silence_s:g} s",
                got=f"none from rank {', '.join(silent)}",
                cure="see whether that process is stopped, and its host reached; connect again on all",
            )

    def end(self) -> None:
        """It does not wait any more."""
        self._heard.is_awaited = False

    def close(self) -> None:
        """Fall silent. Idempotent."""
        self._end()


def _beat(store: Any, rank: int, heard: _Heard, every_s: float) -> None:
    number = 0
    try:
        store = _apart(store)
        while True:
            store.set(heard.keys[rank], str(number))
            if heard.is_awaited:
                heard.beats = [
                    bytes(store.get(key)) if store.check([key]) else b"" for key in heard.keys
                ]
            if heard.is_over.wait(every_s):
                return
            number += 1
    except Exception:  # of any class: it may be a store of the user's
        return  # whose end is the silence of all


def _apart(store: Any) -> Any:
    try:
        return store.clone()
    except Exception:  # there is none in an older torch, nor in a store of the user's
        return store
