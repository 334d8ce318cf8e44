"""Questions to the engines whether their receive still runs, which keep nobody waiting."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from vllm_wt.abreast import error_of, unanswered
from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.fleet import Fleet
from vllm_wt.link import EngineLink

_FIRST_S, _MOST_S = 0.25, 2.0
"""Seconds before the first question, and the most between two of them: with async scheduling such a
call drains the batches in flight."""
_LOOK_S = 0.25
"""Seconds after which an interrupt is noticed that came just before a wait."""


@dataclass(frozen=True)
class _Question:
    answer: Future[WeightTransferError | None]
    until: Deadline


class Polls:
    """Asks every engine of a round now and then.

    Args:
        fleet: Which; hears of those that fail.
        deadline: Of the round. Where others go on without an engine that fails, one that has not
            answered for half of its seconds has.
    """

    def __init__(self, fleet: Fleet, deadline: Deadline) -> None:
        self._fleet = fleet
        self._deadline = deadline
        self._patience = deadline.seconds / 2 if fleet.excludes else deadline.seconds
        self._asked: dict[EngineLink, _Question] = {}
        self._interval = _FIRST_S
        self._next = time.monotonic() + self._interval

    def __call__(self) -> None:
        """Hear what has been answered; ask, if it is time to.

        Raises:
            WeightTransferError: As of `Fleet.fail`.
        """
        self._hear()
        if time.monotonic() < self._next:
            return
        poll = partial(EngineLink.poll, deadline=self._deadline)
        for link in [link for link in self._fleet.links if link not in self._asked]:
            if link.in_process:  # it is used from one thread
                self._take(link, error_of(poll, link))
            else:
                answer = link.caller(partial(error_of, poll, link))
                self._asked[link] = _Question(answer, Deadline(self._patience))
        self._interval = min(2 * self._interval, _MOST_S)
        self._next = time.monotonic() + self._interval

    def finish(self, until: Deadline) -> None:
        """Wait for what has been asked: calls of one engine are made one after another.

        Args:
            until: Who has not answered by then has failed.

        Raises:
            WeightTransferError: As of `Fleet.fail`.
        """
        while self._asked and not until.expired:
            self._wait(until)
            self._hear()
        for link in list(self._asked):
            del self._asked[link]
            self._take(link, unanswered(link))

    def drop(self, until: Deadline) -> None:
        """Wait likewise, whatever the answers are."""
        while not until.expired and not all(each.answer.done() for each in self._asked.values()):
            self._wait(until)

    def _wait(self, until: Deadline) -> None:
        wait([each.answer for each in self._asked.values()], min(_LOOK_S, until.remaining()))

    def _hear(self) -> None:
        for link, question in list(self._asked.items()):
            if question.answer.done():
                del self._asked[link]
                self._take(link, question.answer.result())
            elif question.until.expired:
                del self._asked[link]
                self._take(link, unanswered(link))

    def _take(self, link: EngineLink, error: WeightTransferError | None) -> None:
        if error is not None and link in self._fleet.links:
            self._fleet.fail(link, error)
