"""A trainer of several ranks that share the sending: each broadcasts what it holds to all workers."""

from __future__ import annotations

import hashlib
import inspect
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vllm_wt.deadline import Deadline
from vllm_wt.engine import Sender
from vllm_wt.errors import WeightTransferError
from vllm_wt.info import Count, Identifier, InitInfo, WireInfo
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.pouring import Pouring
from vllm_wt.pull.ring import Filling, Nothing
from vllm_wt.source import WeightSource
from vllm_wt.sources.whole import is_gathered
from vllm_wt.team import Team
from vllm_wt.together import TogetherTrainer
from vllm_wt_nccl.bucketing import bucketing, default_nbytes, scheduled
from vllm_wt_nccl.communicator import Communicator
from vllm_wt_nccl.cutting import Senders, divided
from vllm_wt_nccl.info import Call, Host, NcclInitInfo, Port
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.meeting import decoded, tell
from vllm_wt_nccl.rendezvous import Rendezvous, local_address
from vllm_wt_nccl.shards import Shards
from vllm_wt_nccl.trainer import NcclTrainer

_SENT_S = 0.02
"""Seconds between two looks at whether the round has failed, while a bucket is on its way."""
_FABRICS = ("gloo", "nccl")
"""Which errors of a broadcast are said to be at."""


@dataclass(frozen=True, kw_only=True)
class Place(WireInfo):
    """What the ranks of a trainer tell each other.

    Args:
        session: Of this rank; the first one's counts.
        address: Where workers, and the other ranks, are met; of the first rank.
        port: Likewise.
        group: Number of the communicator that this rank has, 0 for none; None where it sends nothing.
    """

    session: Identifier
    address: Host | None
    port: Port | None
    group: Count | None


class SharingTrainer(TogetherTrainer, NcclTrainer):
    """One of the ranks. The first one keeps the rendezvous and calls the workers; each that has
    something to send has a communicator with them, apart from the others.

    Args:
        source: The weights.
        team: The ranks.
        options: As of `NcclTrainer`.
    """

    __signature__ = inspect.signature(NcclTrainer)  # what errors list as the options

    def __init__(self, source: WeightSource, *, team: Team, **options: Any) -> None:
        self.team = team  # by which it is found out what this rank sends
        self._place: Place | None = None
        self._is_stale = False
        """Whether some rank has not the communicator of the last call."""
        super().__init__(source, team=team, **options)
        self._rank = team.rank

    def join(self, deadline: Deadline) -> None:
        here = socket.gethostname()
        told = self.team.agree({"host": here}, None, deadline, where="connect")
        # The ranks of other hosts must reach the first one, as engines must.
        others = sorted({str(each["host"]) for each in told} - {here})
        self.hosts = (*self.hosts, *others)
        super().join(deadline)

    def share(
        self,
        owners: Sequence[str] | None,
        workers: int | None,
        error: WeightTransferError | None,
    ) -> None:
        if not self.team.leads:
            try:
                self._rendezvous = self._met_at_first_rank()
            except WeightTransferError as caught:
                error = caught
        super().share(owners, workers, error)

    def describe(self, deadline: Deadline) -> InitInfo:
        info = NcclTrainer.describe(self, deadline)
        assert isinstance(info, NcclInitInfo)
        cuts = self._cuts
        if cuts.senders == 1:
            return info
        return replace(info, senders=cuts.senders, kinds=cuts.kinds, kind_of=cuts.kind_of)

    def send(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> None:
        sender = self.sender(readers, deadline, watch)
        if not isinstance(sender, Filling):
            self._pouring.end()  # the others may gather
            return
        self._pouring.pour(sender)
        # The first rank waits for the workers, the others for just this.
        for bucket in list(self._under_way):
            while not self._is_sent(bucket, min(_SENT_S, deadline.remaining())):
                watch()
                deadline.check(
                    "The workers have not taken what this rank sends in time",
                    where=f"bucket {bucket} of {self._buckets.count}",
                )

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        if not self._schedule.count:
            return Nothing()
        if self.team.leads:
            self._call_up(readers, deadline, watch)
        elif self._buckets.count:
            self._be_called(deadline, watch)
        return self._filling(deadline, watch) if self._buckets.count else Nothing()

    def shutdown(self) -> None:
        super().shutdown()
        self.team.close()

    def _own_buckets(self) -> Exposure:
        team, device = self.team, self._device
        dtensors = dict(self.source.distributed())
        senders: Senders = self._senders or _senders_of(team, dtensors)
        if not self._is_size_asked and senders == "all":
            self._bucket_nbytes = default_nbytes(self._manifest, device, team.size)
        self._cuts = cuts = divided(self._manifest, dtensors, team.ranks, senders)
        self._schedule = scheduled(cuts, self._bucket_nbytes, self._verify, device)
        self._sent = Shards(self.source, cuts, team.rank, team.ranks)
        if cuts.senders > 1:
            return self._schedule.streams[team.rank]
        return bucketing(self._sent.manifest(), self._bucket_nbytes, self._verify, device)

    def _new_pouring(self) -> Pouring:
        return Pouring(self._sent, self._sent.manifest(), self._buckets.packed, always=True)

    def _own_describe(self, deadline: Deadline) -> dict[str, Any]:
        if self.team.leads:
            self._host(deadline)
        cuts = json.dumps([self._cuts.kinds, self._cuts.kind_of])
        return {
            "backend": self.backend,
            "names, dtypes or shapes": self._manifest.digest,
            "who sends what": hashlib.sha256(cuts.encode()).hexdigest(),
            "verify": self._verify,
            "staging": self._staging,
            "bucket_nbytes": self._bucket_nbytes,
        }

    def _own_publish(self, version: int, deadline: Deadline) -> None:
        NcclTrainer.publish(self, version, deadline)

    def _own_forget(self) -> None:
        self._pouring.forget()

    def _own_settle(self) -> None:
        NcclTrainer.settle(self)

    def _own_withdraw(self) -> None:
        # The first rank, which keeps the rendezvous, may be gone.
        with suppress(WeightTransferError):
            NcclTrainer.withdraw(self)

    def _is_consequence(self, error: BaseException) -> bool:
        # Workers that are told of a failure elsewhere leave all communicators.
        return super()._is_consequence(error) or _is_of_fabric(error)

    def _own_fail(self, error: WeightTransferError) -> None:
        if self._rendezvous is not None:
            with suppress(WeightTransferError):
                tell(self._rendezvous, Keys(self._ticket), error)

    def _tells(self) -> dict[str, Any]:
        met = self._rendezvous if self.team.leads else None
        group = 0 if self._communicator is None else self._call.group
        place = Place(
            session=self._session,
            address=None if met is None else met.address,
            port=None if met is None else met.port,
            group=group if self._buckets.count else None,
        )
        return {"place": place.to_wire()}

    def _hears(self, told: Sequence[dict[str, Any]]) -> None:
        places = [Place.from_wire(each["place"], backend=self.backend) for each in told]
        self._place = places[0]
        self._session = self._place.session
        groups = {place.group for place in places if place.group is not None}
        self._is_stale = len(groups) > 1 or 0 in groups
        if self._is_stale:
            self._drop_communicator()

    def _met_at_first_rank(self) -> Rendezvous:
        place = self._place
        assert place is not None
        assert place.address is not None
        assert place.port is not None
        return Rendezvous.join(place.session, place.address, place.port, self.until)

    def _be_called(self, deadline: Deadline, watch: Callable[[], None]) -> None:
        """Go by what the first rank has said to the workers."""
        said = self._met.get(
            Keys(self._ticket).call, deadline, "The first rank has not begun to send in time", watch
        )
        call = Call.from_wire(decoded(said, "a call"), backend=self.backend)
        if call.group != self._call.group:
            self._drop_communicator()
        self._call = call

    @property
    def _is_joined(self) -> bool:
        return not self._is_stale and (self._communicator is not None or not self._buckets.count)

    @property
    def _reached_by(self) -> str:
        return local_address(self._met.address) if self._rank else self._met.address

    def _broadcast(self, communicator: Communicator, bucket: int, deadline: Deadline) -> None:
        if bucket == self._buckets.count - 1:  # everything has been read by now
            self._pouring.require_kept("nothing was committed")
        super()._broadcast(communicator, bucket, deadline)

    def _forget(self, ticket: int) -> None:
        if self.team.leads:
            super()._forget(ticket)


def _is_of_fabric(error: BaseException) -> bool:
    return isinstance(error, WeightTransferError) and (error.where or "").startswith(_FABRICS)


def _senders_of(team: Team, dtensors: dict[str, Any]) -> Senders:
    """All, where each has a part of what is sent."""
    return "all" if team.size > 1 and any(map(is_gathered, dtensors.values())) else "rank0"
