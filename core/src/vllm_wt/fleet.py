"""The engines of one round: those that are in it, and why others are not any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from vllm_wt.abreast import each, failures, unanswered
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import PeerDead, WeightTransferError
from vllm_wt.link import EngineLink

logger = logging.getLogger(__name__)

OnFailure = Literal["raise", "exclude"]
"""What becomes of a push before its first commit when an engine fails."""

_LOOK_S = 0.02
"""Seconds between two looks at a call of an earlier push."""
_DISMISS_S = 5.0
"""Seconds that engines which were left out have to end their round; the others have theirs by then."""


class Fleet:
    """The engines of one round.

    Args:
        links: All engines of the session.
        trainer: The trainer's side.
        deadline: Of the round.
        on_failure: ``"raise"``: what fails is raised. ``"exclude"``: who fails is left out, while there
            are others.
    """

    def __init__(
        self,
        links: Sequence[EngineLink],
        trainer: TrainerWeightTransferEngine,
        deadline: Deadline,
        on_failure: OnFailure,
    ) -> None:
        self.links = list(links)
        """Those that are in the round."""
        self.left_out: dict[EngineLink, WeightTransferError] = {}
        """The others, and why."""
        self.excludes = on_failure == "exclude"
        self._trainer = trainer
        self._deadline = deadline

    def begin(self) -> None:
        """A version was published: those that do not answer have no part in it.

        Raises:
            Timeout: One has not answered a call of an earlier push by the deadline.
        """
        for link in list(self.links):
            while not self.excludes and link.caller.is_stuck and not self._deadline.expired:
                self._deadline.wait(_LOOK_S)
            if link.caller.is_stuck:
                self.fail(link, unanswered(link))
            elif link.lost is not None and self.excludes:
                self.fail(link, link.lost)

    def each(self, step: Callable[[EngineLink], object], *, bounded: bool = True) -> None:
        """Take a step with every engine that is in the round, at the same time.

        Args:
            step: What to do with each.
            bounded: Whether an engine that has not answered in half of the time that is left may be
                left out then: the others need the rest.

        Raises:
            WeightTransferError: Of the first engine that failed; if others go on, of none unless all
                have failed.
        """
        if not self.excludes:
            each(self.links, step)
            return
        until = Deadline(self._deadline.remaining() / 2) if bounded else None
        for link, error in failures(self.links, step, until):
            self._leave_out(link, error)
        self._require_any()

    def fail(self, link: EngineLink, error: WeightTransferError) -> None:
        """An engine has failed; raises that, as of `each`."""
        if not self.excludes:
            raise error
        self._leave_out(link, error)
        self._require_any()

    def dismiss(self) -> None:
        """End the round of those that were left out, as far as they answer; let them go on if they
        can."""
        answering = [
            link
            for link, error in self.left_out.items()
            if not (isinstance(error, PeerDead) or link.caller.is_stuck)
        ]

        def end(link: EngineLink) -> None:
            # A Timeout may be the transfer's, of which the engine has told.
            replaced = link.give_up(self._deadline, asks=True)
            if replaced is not None:
                self.left_out[link] = replaced
            link.let_go(self._deadline)

        if answering:
            failures(answering, end, Deadline(_DISMISS_S))
        for link, error in self.left_out.items():
            say_paused([link], error)

    def _leave_out(self, link: EngineLink, error: WeightTransferError) -> None:
        logger.warning("vllm-wt: %s is left out of this push: %s", link.title, error)
        self.links.remove(link)
        self.left_out[link] = error
        self._trainer.leave_out(link.name, link.workers or 0)

    def _require_any(self) -> None:
        if not self.links:
            raise next(iter(self.left_out.values()))


def say_paused(links: Sequence[EngineLink], error: BaseException) -> None:
    """Say in an error which engines stay paused, if any does."""
    paused = ", ".join(link.title for link in links if link.paused)
    if not paused:
        return
    said = (
        f"still paused until a push succeeds: {paused}, which is torn, or could not be asked, or did "
        "not resume"
    )
    logger.error("vllm-wt: %s", said)
    if isinstance(error, WeightTransferError):
        error.cure = f"{error.cure.rstrip('.')}; {said}" if error.cure else said
