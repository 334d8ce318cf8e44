"""The trainer's side: packs the weights into buckets, and broadcasts each to all workers at once."""

from __future__ import annotations

import ipaddress
import json
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import torch

from vllm_wt.deadline import ROUND_S, Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import Sender, TrainerWeightTransferEngine
from vllm_wt.errors import Aborted, InvalidInfo, WeightTransferError, WrongOrder
from vllm_wt.info import InitInfo, Op, Staging, UpdateInfo, Verify, seconds_left
from vllm_wt.options import require_bucket, require_one_of
from vllm_wt.packing import as_bytes
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.pouring import Pouring
from vllm_wt.pull.ring import Filling, Nothing, Ring
from vllm_wt.source import WeightSource
from vllm_wt_nccl.bucketing import bucketing, default_nbytes
from vllm_wt_nccl.communicator import Broadcast, Communicator
from vllm_wt_nccl.cutting import Senders
from vllm_wt_nccl.info import Call, NcclInitInfo, NcclUpdateInfo
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.meeting import made, numbers, tell
from vllm_wt_nccl.options import require_address, require_port, require_senders
from vllm_wt_nccl.quarantine import give_up
from vllm_wt_nccl.rendezvous import Rendezvous, local_address

if TYPE_CHECKING:
    from vllm_wt_nccl.sharing import SharingTrainer

_SENT_S = 0.02
"""Seconds between two looks at whether the round has failed, while a buffer is not free."""


class NcclTrainer(TrainerWeightTransferEngine):
    """Trainer side of the backend.

    Nothing waits for workers but `send`: they meet the trainer at a rendezvous that it keeps, and say
    in each round who takes part. The communicator is made with them, and kept while they stay the same
    and nothing fails.

    Args:
        source: The weights.
        backend: Name of the backend.
        address: Of this host, as the workers reach it; by default that of the way to the engines.
        port: Of the rendezvous there; 0 for any that is free.
        verify: ``"digest"``: every block of 4 KiB is compared by a 64-bit digest before the commit.
            ``"bytes"`` or ``"off"``: only that every bucket has come.
        staging: Where the workers receive; see `vllm_wt.loading.arena`.
        bucket_nbytes: Most bytes of one broadcast, a multiple of 4096.
        senders: Which of several ranks send: ``"all"``, or ``"rank0"``. For ``"all"``, each of them
            connects with ``group``.
        options: Others; none are known.

    Raises:
        InvalidInfo: An option has a wrong value, or is unknown.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        backend: str,
        address: str | None = None,
        port: int = 0,
        verify: Verify = "digest",
        staging: Staging = "auto",
        bucket_nbytes: int | None = None,
        senders: Senders | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, backend=backend, **options)
        require_one_of("verify", verify, get_args(Verify))
        require_one_of("staging", staging, get_args(Staging))
        require_bucket(bucket_nbytes)
        self._address = require_address(address)
        self._port = require_port(port)
        self._verify = verify
        self._staging = staging
        self._session = uuid.uuid4().hex
        self._manifest = source.manifest()
        self._device = next((t.device for _, t in source.at_hand()), source.device)
        self._bucket_nbytes = bucket_nbytes or default_nbytes(self._manifest, self._device)
        self._is_size_asked = bucket_nbytes is not None
        self._senders = require_senders(senders)
        self._sent = source
        """What this rank sends."""
        self._buckets = self._own_buckets()
        self._pouring = self._new_pouring()
        self._ring: Ring | None = None
        self._digests: torch.Tensor | None = None
        self._rendezvous: Rendezvous | None = None
        self._communicator: Communicator | None = None
        self._call = Call(group=0, members=())
        self._under_way: dict[int, Broadcast] = {}
        """Of each bucket that was sent and may not have been read out yet."""
        self._deadline = Deadline(ROUND_S)
        self._is_ready = False
        """Whether the last publish has come to its end, and its buffers are there."""
        self._ticket = 0
        self._version = 0
        self._rank = 0
        """Of the trainer's."""

    @classmethod
    def of_team(cls) -> type[SharingTrainer]:
        from vllm_wt_nccl.sharing import SharingTrainer

        return SharingTrainer

    def describe(self, deadline: Deadline) -> InitInfo:
        self._host(deadline)
        assert self._rendezvous is not None
        return NcclInitInfo(
            session=self._session,
            tensors=InitInfo.tensors_of(self._manifest),
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
            address=self._rendezvous.address,
            port=self._rendezvous.port,
            bucket_nbytes=self._bucket_nbytes,
            verify=self._verify,
            staging=self._staging,
            device="cuda" if self._device.type == "cuda" else "cpu",
        )

    def publish(self, version: int, deadline: Deadline) -> None:
        self._version, self._deadline = version, deadline
        self._ticket += 1
        self._forget(self._ticket - 2)  # late workers may still look at that of the round before
        self._pouring.begin()
        if self._is_steady():
            self._pouring.look()
            return
        self._is_ready = False
        self._manifest.require_same(self.source.manifest().tensors, where="publish")
        if self._ring is None and self._buckets.count:
            self._make_buffers()
        self._pouring.prepare(self._ring)
        self._is_ready = True

    def send(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> None:
        sender = self.sender(readers, deadline, watch)
        if isinstance(sender, Filling):
            self._pouring.pour(sender)

    def sender(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> Sender:
        if self._ring is None:
            return Nothing()
        # Of a worker that has failed core hears from its engine, which `watch` asks.
        self._call_up(readers, deadline, watch)
        return self._filling(deadline, watch)

    def _call_up(self, readers: int | None, deadline: Deadline, watch: Callable[[], None]) -> None:
        """Call all workers, once each of them has said that it takes part."""
        if readers is None:
            raise InvalidInfo(
                "An engine does not say how many workers it has, all of which must take part",
                where="world_size",
                expected="the number of workers",
                got="none",
                cure="give the client a method world_size()",
            )
        rendezvous, keys = self._met, Keys(self._ticket)
        rendezvous.reached(
            keys.here,
            readers,
            deadline,
            "Not all workers have come in time",
            watch,
            lambda here: f"{here} of {readers} workers",
        )
        said = rendezvous.get(keys.who, deadline, "The workers have not said who they are", watch)
        members = tuple(numbers(said))
        if not self._is_joined or self._call.members != members:
            self._drop_communicator()
            self._call = Call(group=self._call.group + 1, members=members)
        rendezvous.put(keys.call, json.dumps(self._call.to_wire()), deadline)

    def _filling(self, deadline: Deadline, watch: Callable[[], None]) -> Filling:
        assert self._ring is not None
        if self._device.type == "cuda":  # what other streams still write must be in what is packed
            torch.cuda.synchronize(self._device)
        communicator = self._joined(deadline)

        def have_read(bucket: int) -> int:
            return int(self._is_sent(bucket, min(_SENT_S, deadline.remaining())))

        def ready(bucket: int) -> None:
            self._broadcast(communicator, bucket, deadline)

        return Filling(
            self._ring,
            self._digests,
            readers=1,
            have_read=have_read,
            ready=ready,
            watch=watch,
            deadline=deadline,
        )

    def withdraw(self) -> None:
        if self._rendezvous is None or not self._ticket:
            return
        given_up = Aborted(
            "The trainer has given the round up",
            backend=self.backend,
            cure="see its error; push again",
        )
        tell(self._rendezvous, Keys(self._ticket), given_up)

    def settle(self) -> None:
        try:
            self._pouring.end()
        finally:
            if not all(map(self._is_over, list(self._under_way))):
                self._drop_communicator()
            self._under_way.clear()

    def update_info(self, op: Op, deadline: Deadline, *, known: int) -> UpdateInfo:
        if op in {"poll", "seal", "all"}:
            self._pouring.require_kept("nothing was committed")
        return NcclUpdateInfo(
            op=op,
            session=self._session,
            version=self._version,
            ticket=self._ticket,
            manifest_digest=self._manifest.digest,
            deadline_s=seconds_left(deadline),
        )

    def serve(self, stop: threading.Event) -> None:
        stop.wait()  # the store has a thread of its own

    def delivered(self) -> int:
        if self._rendezvous is None or not self._ticket:
            return 0
        for bucket in list(self._under_way):
            self._is_sent(bucket)
        return self._rendezvous.add(Keys(self._ticket).done, 0, self._deadline)

    def shutdown(self) -> None:
        self._drop_communicator()
        self._under_way.clear()
        self._rendezvous = None
        self._ring = self._digests = None
        self._is_ready = False
        self._pouring = self._new_pouring()

    def _own_buckets(self) -> Exposure:
        """What this rank sends, in buckets."""
        if self._senders == "all":
            raise InvalidInfo(
                "No other rank of the trainer takes part",
                where="senders",
                expected="WeightSync.connect(..., group=process_group) on each rank",
                got="senders='all' without group",
                cure="give the group of the trainer's ranks; or leave senders out",
            )
        return bucketing(self._manifest, self._bucket_nbytes, self._verify, self._device)

    def _new_pouring(self) -> Pouring:
        return Pouring(self._sent, self._manifest, self._buckets.packed)

    def _host(self, deadline: Deadline) -> None:
        """Be met by the workers."""
        if self._rendezvous is None:
            address = self._address or self._way_to_engines()
            self._rendezvous = Rendezvous.host(self._session, address, self._port, deadline)

    def _is_steady(self) -> bool:
        """Whether everything is as it was prepared in the last round."""
        return self._is_ready and self.source.is_same() and self._pouring.is_steady

    @property
    def _met(self) -> Rendezvous:
        if self._rendezvous is None:
            raise WrongOrder("The trainer cannot be met", cure="connect again")
        return self._rendezvous

    def _way_to_engines(self) -> str:
        """An address of this host that all engines reach: those on this one reach any."""
        ways = [local_address(host) for host in self.hosts]
        others = [way for way in ways if not ipaddress.ip_address(way).is_loopback]
        return next(iter(others + ways), "127.0.0.1")

    def _make_buffers(self) -> None:
        def zeros(nbytes: int) -> torch.Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

        self._ring = Ring(self._buckets, zeros)
        if self._buckets.digested:
            self._digests = torch.zeros(
                self._buckets.blocks, dtype=torch.int64, device=self._device
            )

    @property
    def _is_joined(self) -> bool:
        """Whether the communicator of the last call is there."""
        return self._communicator is not None

    def _joined(self, deadline: Deadline) -> Communicator:
        """The communicator of the call."""
        rendezvous = self._met
        if self._communicator is None:
            self._communicator = made(
                *(rendezvous, self._call, 0, self._reached_by, self._device, deadline, self._rank)
            )
        return self._communicator

    @property
    def _reached_by(self) -> str:
        """The address of this host by which workers reach it."""
        return self._met.address

    def _broadcast(self, communicator: Communicator, bucket: int, deadline: Deadline) -> None:
        assert self._ring is not None
        first, count = self._buckets.digests_of(bucket)
        seconds = deadline.remaining()
        slot = self._ring.slot(bucket)[: count * BLOCK]
        buffers = [slot]
        if self._digests is not None:
            buffers.append(as_bytes(self._digests[first : first + count]))
        self._under_way[bucket] = communicator.broadcast(buffers, seconds)

    def _is_sent(self, bucket: int, seconds: float = 0.0) -> bool:
        """Whether a bucket's buffer is free again, or becomes so soon; raises what has failed."""
        under_way = self._under_way.get(bucket)
        if under_way is not None and not under_way.wait(seconds):
            return False
        self._under_way.pop(bucket, None)
        return True

    def _is_over(self, bucket: int) -> bool:
        try:
            return self._is_sent(bucket)
        except WeightTransferError:
            return False

    def _drop_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not give_up(communicator):
            self._ring = self._digests = None  # they are in use
            self._is_ready = False

    def _forget(self, ticket: int) -> None:
        """What was left for an attempt that nobody asks for any more."""
        if self._rendezvous is not None and ticket > 0:
            for key in Keys(ticket).all:
                self._rendezvous.delete(key, self._deadline)
