"""A trainer of several ranks, each of which exposes its own memory to the workers that are near it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.engine import Sender
from vllm_wt.errors import (
    Aborted,
    InvalidInfo,
    ManifestMismatch,
    TransportError,
    WeightTransferError,
    to_text,
)
from vllm_wt.info import Handle, InitInfo, Op, PullInitInfo, PullUpdateInfo, UpdateInfo
from vllm_wt.pull.exposure import DIGESTED, WITHDRAWN
from vllm_wt.pull.trainer import PullTrainer
from vllm_wt.serving import reading
from vllm_wt.source import WeightSource
from vllm_wt.team import Team, Word, error_of

logger = logging.getLogger(__name__)


class TeamTrainer(PullTrainer):
    """One of the ranks. Each has all weights, under the same names, on its own device; where they
    must be gathered, that is a collective as ever, and every rank has a ring of its own.

    ``join``, ``share``, ``publish`` (or ``refuse``) and ``settle`` are for all ranks to call, in step;
    what fails on one of them is raised on all. Where ``publish`` has failed there is nothing to settle.

    Args:
        source: The weights.
        team: The ranks.
        options: As of `PullTrainer`.
    """

    __signature__ = inspect.signature(PullTrainer)  # what errors list as the options

    def __init__(self, source: WeightSource, *, team: Team, **options: Any) -> None:
        super().__init__(source, **options)
        self.team = team
        self.until = Deadline(0.0)
        """The first rank's deadline: the one that counts."""
        self.workers: int | None = None
        self._readers: list[int] | None = None
        """How many workers read each rank, where they have told."""
        self._handles: list[Handle] = []
        self._generations = 0
        self._is_open = False
        """Whether all ranks have published, and wait for each other's outcome."""
        self._word: Word | None = None
        self._error: WeightTransferError | None = None
        self._cause: WeightTransferError | None = None

    @property
    def generation(self) -> int:
        """Of all ranks together."""
        return self._generations

    def join(self, deadline: Deadline) -> None:
        """Expose this rank's memory and learn of the others'; all ranks call it, once.

        Raises:
            ManifestMismatch: The ranks would not send the same.
            WeightTransferError: What failed on any of them.
        """

        def exposed() -> dict[str, Any]:
            info = super(TeamTrainer, self).describe(deadline)
            assert isinstance(info, PullInitInfo)
            return {
                "backend": self.backend,
                "names, dtypes or shapes": info.manifest_digest,
                "tensors to be gathered, or not contiguous": [list(run) for run in info.packed],
                "verify": info.verify,
                "staging": info.staging,
                "bucket_nbytes": info.bucket_nbytes,
                "slots": info.slots,
                "mapped": info.mapped,
            }

        self._agree("connect", deadline, exposed)

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
        readers = None
        if owners is not None:
            readers = [owners.count(handle.owner) for handle in self._handles]
            readers = readers if sum(readers) == len(owners) == workers else None
        said = {"workers": workers, "readers": readers}
        told = self.team.agree(said, error, self.until, where="engines")
        self.workers, self._readers = told[0]["workers"], told[0]["readers"]

    def describe(self, deadline: Deadline) -> InitInfo:
        info = super().describe(deadline)
        assert isinstance(info, PullInitInfo)
        return replace(info, others=tuple(self._handles[1:]))

    def publish(self, version: int, deadline: Deadline) -> None:
        self._error = self._cause = None

        def published() -> dict[str, Any]:
            super(TeamTrainer, self).publish(version, deadline)
            return {"version": version}

        try:
            self._agree("publish", deadline, published)
        except BaseException:
            self._pouring.forget()  # no rank has begun to make anything
            raise
        self._is_open = True
        if not self.team.leads:
            self._word = self.team.listen(self.until)

    def refuse(self, error: WeightTransferError, deadline: Deadline) -> None:
        """Instead of ``publish``, which the other ranks are in or come to; raises ``error``."""
        self.team.agree({}, error, deadline, where="publish")

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        return super().sender(self._share_of(readers), deadline, watch)

    def watch(self) -> None:
        """See that the first rank has not given the round up."""
        if self._word is not None and self._word.is_bad:
            raise Aborted(
                "The first rank of the trainer has given the round up",
                where="send",
                cure="see its error; push again on all ranks",
            )

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        info = super().update_info(op, deadline, known=-1)
        assert isinstance(info, PullUpdateInfo)
        if info.handle is None or known == self._generations:
            return replace(info, handle=None)
        return replace(info, others=tuple(self._handles[1:]))

    def delivered(self) -> int:
        # Others' readers report to these; the seal waits for who has not.
        reported = super().delivered()
        if self._readers is None:
            return reported * self.team.size
        return reported if reported < self._readers[self.team.rank] else sum(self._readers)

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
        if self._is_open and self._signals is not None and not self.team.leads:
            # Its readers would wait for it, and the first rank for them.
            self._signal(WITHDRAWN, self._ticket + (0 if self._is_mapped else 1))
            if self._is_mapped:
                self._signal(DIGESTED, self._ticket)

    def behind(self, error: BaseException) -> BaseException:
        """What is behind an error of this rank's round, once it is settled: what it heard of another
        rank, where its own is just a consequence."""
        is_consequence = isinstance(error, Aborted) and self._cause is not None
        return self._cause if is_consequence and self._cause is not None else error

    def settle(self) -> None:
        """Raises what failed on another rank, if anything did and nothing has on this one."""
        if not self._is_open:
            super().settle()
            return
        self._is_open = False
        has_failed = self._error is not None
        try:
            if self.team.leads:  # first: others may wait for their readers, and not gather
                self._word = self.team.say(failed=has_failed, deadline=self.until)
            super().settle()
            if not has_failed:
                super().require_kept()
        except WeightTransferError as error:
            self._error = self._error or error
        except BaseException:
            self.team.close()
            raise
        text = None if self._error is None else to_text(self._error)
        try:
            told = self.team.exchange({"error": text}, self.until, where="settle")
        except WeightTransferError as lost:
            super().withdraw()
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
        own_ones = [error for error in errors if not isinstance(error, Aborted)]
        self._cause = next(iter(own_ones + errors), None)
        if self._error is not None and not has_failed:
            raise self._error
        if self._error is None and self._cause is not None:
            super().withdraw()
            raise self._cause

    def shutdown(self) -> None:
        super().shutdown()
        self.team.close()

    def _share_of(self, readers: int | None) -> int | None:
        if self._readers is not None:
            return self._readers[self.team.rank]
        if readers is None:
            return None
        if self._settled.count and readers % self.team.size:
            raise InvalidInfo(
                "The engines' workers do not divide among the ranks of the trainer, and do not tell "
                "which one they read",
                where="group",
                expected=f"a multiple of {self.team.size} workers, or a client with reports()",
                got=f"{readers} workers",
                cure="give the client a method reports(), or as many ranks as workers",
            )
        return readers // self.team.size

    def _agree(self, where: str, deadline: Deadline, step: Callable[[], dict[str, Any]]) -> None:
        """A step after which all ranks expose the same, of which it tells."""
        said: dict[str, Any] = {}
        error: WeightTransferError | None = None
        try:
            with reading(where):
                same = step()
                said = {
                    "same": same,
                    "handle": self._handle().to_wire(),
                    "generation": super().generation,
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
        self._handles = [Handle.from_wire(each["handle"], backend=self.backend) for each in told]
        self._generations = sum(each["generation"] for each in told)
        # Readers of all ranks are told one; a rank that has refused a push has used one less.
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
