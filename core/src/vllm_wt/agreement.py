"""How the ranks of one engine agree on a step: a failure anywhere is a failure everywhere.

Only the highest rank raises it (see `vllm_wt.ranks`); what was under way is given up on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_wt.errors import TransportError, WeightTransferError, from_facts
from vllm_wt.ranks import Ranks, Report

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds beyond a step's deadline that ranks wait for each other: they started it together."""


class Agreement:
    """One rank's part in the votes of its engine.

    Args:
        ranks: The workers of this vLLM engine.
        backend: Named in errors.
        abandon: Ends what is under way here, for the reason that it is given.
    """

    def __init__(self, ranks: Ranks, backend: str, abandon: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._backend = backend
        self._abandon = abandon
        self._steps = 0
        self.rank = ranks.rank
        self.has_agreed = False
        """Whether the last step has succeeded on every rank."""
        self.streams = False
        """Whether any rank said with the last step that it loads what it receives at once."""

    def typed(self, error: Exception, phase: str) -> WeightTransferError:
        """The error of a step as one of ours, naming the backend and where it happened."""
        if not isinstance(error, WeightTransferError):
            logger.error("vllm-wt: %s failed", phase, exc_info=error)
            error = TransportError(
                f"{type(error).__name__}: {error}",
                cure="see the worker's log for where it was raised; push again",
            )
        error.backend = error.backend or self._backend
        error.where = error.where or phase
        return error

    def reached(
        self,
        phase: str,
        error: WeightTransferError | None,
        seconds: float,
        *,
        spares: tuple[type[WeightTransferError], ...] = (),
        streams: bool = False,
    ) -> bool:
        """Whether every rank has succeeded. If not, end the round, and raise on the highest rank.

        Args:
            phase: The step, for the other ranks and for people.
            error: What failed here.
            seconds: That the other ranks may still take with theirs.
            spares: Errors for which nothing was done: a round that is open goes on.
            streams: Whether this rank loads what it receives at once.

        Raises:
            WeightTransferError: Of the first rank that failed; or Timeout, TransportError: the ranks
                could not be heard. On the highest rank only.
        """
        self.has_agreed = False
        facts = error.facts() if error is not None else None
        try:
            reports = self._exchange(phase, facts, seconds, streams)
        except WeightTransferError as lost:
            # Raised here it would be an answer too many, once a rank that was stopped goes on.
            if self._is_highest:
                raise
            logger.warning("vllm-wt: %s: %s", phase, lost)
            return False
        self.streams = any(report.streams for report in reports)
        failed = {rank: r.error for rank, r in enumerate(reports) if r.error is not None}
        if not failed:
            self.has_agreed = True
            return True
        first = from_facts(next(iter(failed.values())))
        if self._ranks.size > 1:
            first.ranks = {rank: str(facts["what"]) for rank, facts in failed.items()}
        logger.warning("vllm-wt: %s failed: %s", phase, first)
        if not all(isinstance(from_facts(facts), spares) for facts in failed.values()):
            self._abandon(str(first))
        if self._is_highest:
            raise first
        return False

    @property
    def _is_highest(self) -> bool:
        return self._ranks.rank == self._ranks.size - 1

    def _exchange(
        self, phase: str, error: dict[str, object] | None, seconds: float, streams: bool
    ) -> list[Report]:
        """Every rank's report on this step; nothing stays open when they cannot be had."""
        self._steps += 1
        step = f"{self._steps} {phase}"
        try:
            reports = self._ranks.exchange(Report(error, step, streams), seconds + GRACE_S)
            if others := sorted({r.step for r in reports} - {step}):
                raise TransportError(
                    "The ranks of this engine have fallen out of step",
                    where=f"rank {self._ranks.rank} of {self._ranks.size}",
                    expected=step,
                    got=", ".join(others),
                    backend=self._backend,
                    cure="restart the engine",
                )
        except BaseException:
            self._abandon("the ranks could not agree")
            raise
        return reports
