"""A trainer of several ranks, each of which exposes its own memory to the workers that are near it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.engine import Sender
from vllm_wt.errors import InvalidInfo, WeightTransferError
from vllm_wt.info import Handle, InitInfo, Op, PullInitInfo, PullUpdateInfo, UpdateInfo
from vllm_wt.pull.exposure import DIGESTED, WITHDRAWN
from vllm_wt.pull.trainer import PullTrainer
from vllm_wt.source import WeightSource
from vllm_wt.team import Team
from vllm_wt.together import TogetherTrainer


class TeamTrainer(TogetherTrainer, PullTrainer):
    """One of the ranks. Each has all weights, under the same names, on its own device; where they
    must be gathered, that is a collective as ever, and every rank has a ring of its own.

    Args:
        source: The weights.
        team: The ranks.
        options: As of `PullTrainer`.
    """

    __signature__ = inspect.signature(PullTrainer)  # what errors list as the options

    def __init__(self, source: WeightSource, *, team: Team, **options: Any) -> None:
        super().__init__(source, team=team, **options)
        self._readers: list[int] | None = None
        """How many workers read each rank, where they have told."""
        self._handles: list[Handle] = []
        self._generations = 0

    @property
    def generation(self) -> int:
        """Of all ranks together."""
        return self._generations

    def share(
        self,
        owners: Sequence[str] | None,
        workers: int | None,
        error: WeightTransferError | None,
    ) -> None:
        readers = None
        if owners is not None:
            readers = [owners.count(handle.owner) for handle in self._handles]
            readers = readers if sum(readers) == len(owners) == workers else None
        said = {"workers": workers, "readers": readers}
        told = self.team.agree(said, error, self.until, where="engines")
        self.workers, self._readers = told[0]["workers"], told[0]["readers"]

    def describe(self, deadline: Deadline) -> InitInfo:
        info = PullTrainer.describe(self, deadline)
        assert isinstance(info, PullInitInfo)
        return replace(info, others=tuple(self._handles[1:]))

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        return super().sender(self._share_of(readers), deadline, watch)

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

    @property
    def can_leave_out(self) -> bool:
        """Each rank has readers of its own, and does not know of which engine."""
        return False

    def shutdown(self) -> None:
        super().shutdown()
        self.team.close()

    def _own_describe(self, deadline: Deadline) -> dict[str, Any]:
        info = PullTrainer.describe(self, deadline)
        assert isinstance(info, PullInitInfo)
        return {
            "backend": self.backend,
            "transport": info.transport,
            "names, dtypes or shapes": info.manifest_digest,
            "tensors to be gathered, or not contiguous": [list(run) for run in info.packed],
            "verify": info.verify,
            "staging": info.staging,
            "bucket_nbytes": info.bucket_nbytes,
            "slots": info.slots,
            "mapped": info.mapped,
        }

    def _own_publish(self, version: int, deadline: Deadline) -> None:
        PullTrainer.publish(self, version, deadline)

    def _own_forget(self) -> None:
        self._pouring.forget()

    def _own_settle(self) -> None:
        PullTrainer.settle(self)

    def _own_withdraw(self) -> None:
        PullTrainer.withdraw(self)

    def _own_require_kept(self) -> None:
        PullTrainer.require_kept(self)

    def _own_fail(self, error: WeightTransferError) -> None:
        if self._signals is not None:
            self._signal(WITHDRAWN, self._ticket + (0 if self._is_mapped else 1))
            if self._is_mapped:
                self._signal(DIGESTED, self._ticket)

    def _tells(self) -> dict[str, Any]:
        return {"handle": self._handle().to_wire(), "generation": self._generation}

    def _hears(self, told: Sequence[dict[str, Any]]) -> None:
        self._handles = [Handle.from_wire(each["handle"], backend=self.backend) for each in told]
        self._generations = sum(each["generation"] for each in told)

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
