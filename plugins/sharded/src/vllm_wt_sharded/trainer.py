"""The trainer's side: each rank exposes what it holds, where it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, WeightTransferError
from vllm_wt.info import Handle, InitInfo, Op, PullInitInfo, PullUpdateInfo, UpdateInfo
from vllm_wt.manifest import Manifest
from vllm_wt.pull import PullTrainer, TeamTrainer
from vllm_wt.source import WeightSource
from vllm_wt.team import Team
from vllm_wt_sharded.exposing import PiecesSource
from vllm_wt_sharded.info import OwnerInfo, ShardedInitInfo, ShardedUpdateInfo
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.options import carrier
from vllm_wt_sharded.sources import ShardedSource, TensorShards, joined


class ShardedTrainer(PullTrainer):
    """A trainer of one rank.

    Args:
        source: The weights; a `ShardedSource`, or any other, whose DTensors are exposed in shards.
        backend: Name of this backend.
        over: The backend that moves the bytes: ``"rdma"``, ``"ipc"`` or another of kind transport. By
            default the first of these that is installed.
        transport: Which of its Transports.
        options: ``verify``, ``staging`` and ``bucket_nbytes``, as of `PullTrainer`.

    Raises:
        InvalidInfo, ManifestMismatch: An option has a wrong value, or of the source.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        backend: str,
        over: str | None = None,
        transport: str | None = None,
        **options: Any,
    ) -> None:
        self._sharded = _sharded(source, 0, 1)
        self._whole = Manifest(self._sharded.tensors)
        self._pieces = PiecesSource(self._sharded)
        self._over, name, transport_cls = carrier(over, transport)
        options |= {"transport_cls": transport_cls, "transport": name}
        super().__init__(self._pieces, backend=backend, **options)

    @classmethod
    def of_team(cls) -> Callable[..., TeamTrainer]:
        return ShardedTeamTrainer

    @property
    def _is_mapped(self) -> bool:
        return False  # what workers take, they put together

    def describe(self, deadline: Deadline) -> InitInfo:
        info = super().describe(deadline)
        assert isinstance(info, PullInitInfo)
        layout = joined([self._pieces.layout])
        return _init_info(info, self._over, layout, [OwnerInfo.of(info)])

    def publish(self, version: int, deadline: Deadline) -> None:
        if not self._pieces.is_same():
            self._pieces.begin()
        super().publish(version, deadline)

    def settle(self) -> None:
        super().settle()
        self._pieces.end()

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        info = super().update_info(op, deadline, known=known)
        assert isinstance(info, PullUpdateInfo)
        handles = () if info.handle is None else (info.handle,)
        return _update_info(info, self._whole.digest, handles)


class ShardedTeamTrainer(TeamTrainer):
    """One of several ranks.

    Args:
        source: As of `ShardedTrainer`; a `ShardedSource` of this rank.
        team: The ranks.
        backend, over, transport, options: As of `ShardedTrainer`; the same on all ranks.
    """

    __signature__ = inspect.signature(ShardedTrainer)

    def __init__(
        self,
        source: WeightSource,
        *,
        team: Team,
        backend: str,
        over: str | None = None,
        transport: str | None = None,
        **options: Any,
    ) -> None:
        self._sharded = _sharded(source, team.rank, team.size)
        self._whole = Manifest(self._sharded.tensors)
        self._pieces = PiecesSource(self._sharded)
        self._layout: Layout | None = None
        """Of all ranks, once they have told."""
        self._owners: list[OwnerInfo] = []
        self._over, name, transport_cls = carrier(over, transport)
        options |= {"transport_cls": transport_cls, "transport": name}
        super().__init__(self._pieces, team=team, backend=backend, **options)

    @property
    def _is_mapped(self) -> bool:
        return False

    def share(
        self,
        owners: Sequence[str] | None,
        workers: int | None,
        error: WeightTransferError | None,
    ) -> None:
        readers = None
        if owners is not None and len(owners) == workers:
            read = [each.split(",") for each in owners]
            readers = [sum(h.owner in each for each in read) for h in self._handles]
        elif error is None:
            error = InvalidInfo(
                "The engines do not say which ranks of the trainer their workers read",
                backend=self.backend,
                where="engines",
                expected="clients with reports()",
                got="none",
                cure="connect to engines by a client of vllm_wt.clients",
            )
        said = {"workers": workers, "readers": readers}
        told = self.team.agree(said, error, self.until, where="engines")
        self.workers, self._readers = told[0]["workers"], told[0]["readers"]

    def describe(self, deadline: Deadline) -> InitInfo:
        info = PullTrainer.describe(self, deadline)
        assert isinstance(info, PullInitInfo)
        assert self._layout is not None
        owners = [
            replace(owner, handle=handle)
            for owner, handle in zip(self._owners, self._handles, strict=True)
        ]
        return _init_info(info, self._over, self._layout, owners)

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        info = PullTrainer.update_info(self, op, deadline, known=-1)
        assert isinstance(info, PullUpdateInfo)
        new = info.handle is not None and known != self._generations
        return _update_info(info, self._whole.digest, tuple(self._handles) if new else ())

    def delivered(self) -> int:
        # Others' readers report to these; the seal waits for who has not.
        if self._readers is None or self.workers is None:
            return 0
        reported = PullTrainer.delivered(self)
        is_read = reported >= self._readers[self.team.rank]
        return self.workers if is_read else min(reported, self.workers - 1)

    def _own_describe(self, deadline: Deadline) -> dict[str, Any]:
        info = PullTrainer.describe(self, deadline)
        assert isinstance(info, PullInitInfo)
        self._owner = OwnerInfo.of(info)
        return {
            "backend": self.backend,
            "over": self._over,
            "transport": info.transport,
            "names, dtypes or shapes": self._whole.digest,
            "verify": info.verify,
            "staging": info.staging,
        }

    def _own_publish(self, version: int, deadline: Deadline) -> None:
        if not self._pieces.is_same():
            self._pieces.begin()
        super()._own_publish(version, deadline)

    def _own_settle(self) -> None:
        super()._own_settle()
        self._pieces.end()

    def _tells(self) -> dict[str, Any]:
        told = super()._tells()
        if self._layout is None:
            told |= {"owner": self._owner.to_wire(), "layout": self._pieces.layout.to_wire()}
        return told

    def _hears(self, told: Sequence[dict[str, Any]]) -> None:
        super()._hears(told)
        if self._layout is None:
            self._owners = [
                OwnerInfo.from_wire(each["owner"], backend=self.backend) for each in told
            ]
            self._layout = joined([Layout.from_wire(each["layout"]) for each in told])

    def _share_of(self, readers: int | None) -> int | None:
        return None if self._readers is None else self._readers[self.team.rank]


def _sharded(source: WeightSource, rank: int, ranks: int) -> ShardedSource:
    if not isinstance(source, ShardedSource):
        return TensorShards(source, rank=rank, ranks=ranks)
    if (source.rank, source.ranks) != (rank, ranks):
        raise InvalidInfo(
            "This source is of another rank",
            where="source",
            expected=f"rank {rank} of {ranks}",
            got=f"rank {source.rank} of {source.ranks}",
            cure="connect with group= on all ranks of the trainer, each with its own source",
        )
    return source


def _init_info(
    info: PullInitInfo, over: str, layout: Layout, owners: Sequence[OwnerInfo]
) -> ShardedInitInfo:
    manifest = Manifest(layout.tensors)
    return ShardedInitInfo(
        session=info.session,
        tensors=InitInfo.tensors_of(manifest),
        manifest_digest=manifest.digest,
        deadline_s=info.deadline_s,
        over=over,
        transport=info.transport,
        layout=layout.to_wire(),
        layout_digest=layout.digest,
        owners=tuple(owners),
        verify=info.verify,
        staging=info.staging,
    )


def _update_info(
    info: PullUpdateInfo, digest: str, handles: tuple[Handle, ...]
) -> ShardedUpdateInfo:
    return ShardedUpdateInfo(
        op=info.op,
        session=info.session,
        version=info.version,
        ticket=info.ticket,
        manifest_digest=digest,
        deadline_s=info.deadline_s,
        handles=handles,
    )
