"""A trainer's side that is one of several ranks: what they do in step, whatever moves the bytes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import (
    Aborted,
    ManifestMismatch,
    TransportError,
    WeightTransferError,
    to_text,
)
from vllm_wt.serving import reading
from vllm_wt.source import WeightSource
from vllm_wt.team import Team, Word, error_of

logger = logging.getLogger(__name__)


class TogetherTrainer(TrainerWeightTransferEngine):
    """One of the ranks. A backend puts this before the trainer's side that it has for one rank, and
    says here what each step is of a rank by itself.

    ``join``, ``share``, ``publish`` (or ``refuse``) and ``settle`` are for all ranks to call, in step;
    what fails on one of them is raised on all. Where ``publish`` has failed there is nothing to settle.
    Its ``shutdown`` is to close the team.

    Args:
        source: The weights.
        team: The ranks.
        options: As of the trainer's side for one rank.
    """

    def __init__(self, source: WeightSource, *, team: Team, **options: Any) -> None:
        super().__init__(source, **options)
        self.team = team
        self.until = Deadline(0.0)
        """The first rank's deadline: the one that counts."""
        self.workers: int | None = None
        self._ticket = 0
        self._is_open = False
        """Whether all ranks have published, and wait for each other's outcome."""
        self._word: Word | None = None
        self._error: WeightTransferError | None = None
        self._cause: WeightTransferError | None = None

    @abstractmethod
    def _own_describe(self, deadline: Deadline) -> dict[str, Any]:
        """Be ready for engines to be connected; what of that must be the same on all ranks."""

    @abstractmethod
    def _own_publish(self, version: int, deadline: Deadline) -> None: ...

    @abstractmethod
    def _own_forget(self) -> None:
        """What was published is not sent: no rank has begun to make anything."""

    @abstractmethod
    def _own_settle(self) -> None: ...

    @abstractmethod
    def _own_withdraw(self) -> None: ...

    def _own_require_kept(self) -> None:
        """What workers may have read is what it was."""

    @abstractmethod
    def _own_fail(self, error: WeightTransferError) -> None:
        """This rank fails in a round that all have published: workers need not wait for it."""

    @abstractmethod
    def _tells(self) -> dict[str, Any]:
        """What the other ranks are to know of this one, JSON-safe."""

    @abstractmethod
    def _hears(self, told: Sequence[dict[str, Any]]) -> None:
        """That of each rank."""

    def join(self, deadline: Deadline) -> None:
        """Be ready for engines, and learn of the other ranks; all ranks call it, once.

        Raises:
            ManifestMismatch: The ranks would not send the same.
            WeightTransferError: What failed on any of them.
        """
        self._agree("connect", deadline, lambda: self._own_describe(deadline))

    def share(
        self,
        owners: Sequence[str] | None,
        workers: int | None,
        error: WeightTransferError | None,
    ) -> None:
        """The first rank has connected the engines.

        Args:
            owners: Whom each worker says that it reads, if all do.
            workers: Of all engines, if they tell.
            error: What failed there.

        Raises:
            WeightTransferError: What failed on any rank.
        """
        told = self.team.agree({"workers": workers}, error, self.until, where="engines")
        self.workers = told[0]["workers"]

    def publish(self, version: int, deadline: Deadline) -> None:
        self._error = self._cause = None

        def published() -> dict[str, Any]:
            self._own_publish(version, deadline)
            return {"version": version}

        try:
            self._agree("publish", deadline, published)
        except BaseException:
            self._own_forget()
            raise
        self._is_open = True
        if not self.team.leads:
            self._word = self.team.listen(self.until)

    def refuse(self, error: WeightTransferError, deadline: Deadline) -> None:
        """Instead of ``publish``, which the other ranks are in or come to; raises ``error``."""
        self.team.agree({}, error, deadline, where="publish")

    def watch(self) -> None:
        """See that the first rank has not given the round up."""
        if self._word is not None and self._word.is_bad:
            raise Aborted(
                "The first rank of the trainer has given the round up",
                where="send",
                cure="see its error; push again on all ranks",
            )

    def fail(self, error: BaseException) -> None:
        """Something of this rank's has failed between ``publish`` and ``settle``."""
        self._error = (
            error
            if isinstance(error, WeightTransferError)
            else TransportError(
                f"The push was given up: {type(error).__name__}: {error}",
                cure="see that rank's own log for the cause; push again on all ranks",
            )
        )
        if self._is_open and not self.team.leads:
            # Workers would wait for it, and the first rank for them.
            self._own_fail(self._error)

    def behind(self, error: BaseException) -> BaseException:
        """What is behind an error of this rank's round, once it is settled: what it heard of another
        rank, where its own is just a consequence."""
        cause = self._cause
        if cause is None or not self._is_consequence(error):
            return error
        return cause if isinstance(error, Aborted) or not self._is_consequence(cause) else error

    def _is_consequence(self, error: BaseException) -> bool:
        """Whether this may have come of a failure of another rank."""
        return isinstance(error, Aborted)

    def settle(self) -> None:
        """Raises what failed on another rank, if anything did and nothing has on this one."""
        if not self._is_open:
            self._own_settle()
            return
        self._is_open = False
        has_failed = self._error is not None
        try:
            if self.team.leads:  # first: others may wait for their readers, and not gather
                self._word = self.team.say(failed=has_failed, deadline=self.until)
            self._own_settle()
            if not has_failed:
                self._own_require_kept()
        except WeightTransferError as error:
            self._error = self._error or error
        except BaseException:
            self.team.close()
            raise
        text = None if self._error is None else to_text(self._error)
        try:
            told = self.team.exchange({"error": text}, self.until, where="settle")
        except WeightTransferError as lost:
            self._own_withdraw()
            if self._error is None:
                raise
            logger.warning("vllm-wt: the other ranks could not be told: %s", lost)
            self._cause = lost
            return
        finally:
            self._word = None
        errors = [
            error_of(rank, each["error"], where="push")
            for rank, each in enumerate(told)
            if each["error"] is not None and rank != self.team.rank
        ]
        own_ones = [error for error in errors if not self._is_consequence(error)]
        self._cause = next(iter(own_ones + errors), None)
        if self._error is not None and not has_failed:
            raise self._error
        if self._error is None and self._cause is not None:
            self._own_withdraw()
            raise self._cause

    def _agree(self, where: str, deadline: Deadline, step: Callable[[], dict[str, Any]]) -> None:
        """A step after which all ranks send the same, of which it tells."""
        said: dict[str, Any] = {}
        error: WeightTransferError | None = None
        try:
            with reading(where, deadline):
                same = step()
                said = {
                    **self._tells(),
                    "same": same,
                    "ticket": self._ticket,
                    "seconds": deadline.remaining(),
                }
        except WeightTransferError as caught:
            error = caught
        except BaseException:
            self.team.close()
            raise
        told = self.team.agree(said, error, deadline, where=where)
        for rank, each in enumerate(told):
            _require_same(rank, each["same"], told[0]["same"], where)
        self._hears(told)
        # Workers are told one; a rank that has refused a push has used one less.
        self._ticket = max(each["ticket"] for each in told)
        self.until = Deadline(told[0]["seconds"])


def _require_same(rank: int, same: dict[str, Any], first: dict[str, Any], where: str) -> None:
    differing = [name for name, value in first.items() if same.get(name) != value]
    if not differing:
        return
    raise ManifestMismatch(
        f"Rank {rank} of the trainer would not send what rank 0 does",
        where=f"{where}: {', '.join(differing)}",
        expected=", ".join(str(first[name]) for name in differing),
        got=", ".join(str(same.get(name)) for name in differing),
        cure="call connect and push on all ranks alike, with the same weights, options and version",
    )
