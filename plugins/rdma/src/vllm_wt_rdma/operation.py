"""A prepared plan and one pass over it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_wt.errors import Revoked, WrongOrder
from vllm_wt.transport import Progress
from vllm_wt_rdma.batching import CHUNK_BYTES
from vllm_wt_rdma.emulation import Sample, Trial
from vllm_wt_rdma.endpoint import Endpoint
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.region import Region
from vllm_wt_rdma.words import Words

_IN_FLIGHT_BYTES = 4 * CHUNK_BYTES
"""Most bytes posted and not complete: enough to keep a fast network busy between two polls."""
_DRAIN_S = 0.05
"""Seconds that a cancelled pass gets to complete what it has posted, about two chunks within a
host: the endpoint can go on then."""
_DRAIN_POLL_S = 0.0002


@dataclass(frozen=True)
class Read:
    """A read of the endpoint's, and how many bytes of the plan it brings."""

    number: int
    nbytes: int


@dataclass(frozen=True)
class Beacon:
    """Tells whether one owner's generation may still be read.

    Args:
        owner: Its name.
        generation: The generation that was opened.
        nonce: What its beacon must hold.
        slot: The word that our copy of the beacon goes to.
        read: Fetches it.
    """

    owner: str
    generation: int
    nonce: int
    slot: int
    read: Read


@dataclass(eq=False)
class Prepared:
    """Everything a round needs, made once.

    Args:
        region: Where the bytes go.
        data: The reads, in the order in which they are posted.
        beacons: One for each owner.
        samples: Those of the reads that can be timed.
    """

    region: Region
    data: list[Read] = field(default_factory=list)
    beacons: list[Beacon] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    revoked: bool = False
    busy: bool = False

    def release(self, endpoint: Endpoint, words: Words) -> None:
        """Give back what it holds; it can't be submitted any more."""
        self.revoked = True
        while self.data:
            endpoint.release(self.data.pop().number)
        while self.beacons:
            release_beacon(self.beacons.pop(), endpoint, words)


class Plan:
    """What core holds: once it is dropped, the transport gives back what was prepared."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared


class Operation:
    """One pass over a plan: the owners' beacons, then the data, then the beacons again.

    The first look keeps a pass from starting on memory that was revoked, the second one notices
    what was revoked while it was read. Between them a read that is to be timed is made by itself, and
    once more with the others: bytes count when these bring them.

    Args:
        endpoint: Which the plan's reads belong to.
        words: Where the beacons' copies are.
        plan: What is read.
        trials: What is timed first.
    """

    def __init__(
        self, endpoint: Endpoint, words: Words, plan: Plan, trials: Sequence[Trial] = ()
    ) -> None:
        self._plan = plan  # keeps what was prepared from being given back
        self._prepared = plan.prepared
        self._endpoint = endpoint
        self._words = words
        looks = [beacon.read for beacon in self._prepared.beacons]
        timed = [[Read(trial.sample.number, trial.sample.nbytes)] for trial in trials]
        self._stages = [looks, *timed, self._prepared.data, looks]
        self._trials = dict(enumerate(trials, start=1))
        """By stage."""
        self._stage = 0
        self._next = 0
        self._in_flight: list[Read] = []
        self._landed = 0
        self._given_up = False
        self._failed = False
        self._prepared.busy = True
        self._clear_words()

    def advance(self) -> Progress:
        """Take in what is complete and post what fits, at most a chunk where posting copies.

        Raises:
            PeerDead, Revoked, TransportError: The pass has failed.
            WrongOrder: It had failed, or was cancelled, before.
        """
        if self._given_up or self._failed:
            raise WrongOrder(
                "This pass has ended", backend=BACKEND, where="poll", cure="submit the plan again"
            )
        try:
            self._collect()
            copied = 0
            while self._stage < len(self._stages):
                copied = self._post(copied)
                if self._in_flight or self._next < len(self._stages[self._stage]):
                    break
                self._end_stage()
        except BaseException:
            self._failed = True
            raise
        done = self._stage == len(self._stages)
        self._prepared.busy = not done
        return Progress(done, self._landed)

    def give_up(self) -> bool:
        """Post nothing more, and let what is in flight complete, for a bounded time.

        Returns:
            Whether nothing that was posted may still write.
        """
        self._given_up = True
        end = time.monotonic() + _DRAIN_S
        while self._in_flight and not self._failed and time.monotonic() < end:
            self._collect()
            time.sleep(_DRAIN_POLL_S)
        quiet = not self._in_flight and not self._failed
        if quiet:
            self._prepared.busy = False
        return quiet

    def _collect(self) -> None:
        for read in tuple(self._in_flight):
            if self._endpoint.check(read.number):
                self._land(read)

    def _post(self, copied: int) -> int:
        """Post reads of this stage; returns the bytes copied inside calls so far."""
        stage = self._stages[self._stage]
        pending = sum(read.nbytes for read in self._in_flight)
        while self._next < len(stage):
            read = stage[self._next]
            if pending and pending + read.nbytes > _IN_FLIGHT_BYTES:
                break
            if copied and copied + read.nbytes > CHUNK_BYTES:
                break
            # In the list before it is posted: should the call fail, it may have started all the same.
            self._in_flight.append(read)
            self._next += 1
            if self._stage in self._trials:
                self._trials[self._stage].begin()
            if self._endpoint.post(read.number):
                self._land(read)
                copied += read.nbytes
            else:
                pending += read.nbytes
        return copied

    def _land(self, read: Read) -> None:
        self._in_flight.remove(read)
        if self._stage not in self._trials:
            self._landed += read.nbytes

    def _end_stage(self) -> None:
        if self._stage in self._trials:
            if not self._trials[self._stage].is_over():
                self._next = 0
                return
        elif self._stages[self._stage] is not self._prepared.data:
            for beacon in self._prepared.beacons:
                check_beacon(self._words, beacon)
            self._clear_words()
        self._stage += 1
        self._next = 0

    def _clear_words(self) -> None:
        """What an earlier look has left must not be taken for this one's."""
        for beacon in self._prepared.beacons:
            self._words[beacon.slot] = 0


def check_beacon(words: Words, beacon: Beacon) -> None:
    """Raise :class:`Revoked` unless the beacon was lit when it was last read."""
    if words[beacon.slot] != beacon.nonce:
        raise Revoked(
            f"Owner {beacon.owner!r} doesn't expose this memory any more",
            backend=BACKEND,
            where="read",
            expected=f"generation {beacon.generation}",
            got="revoked, or another process at its address",
            cure="open the owner's new handle",
        )


def release_beacon(beacon: Beacon, endpoint: Endpoint, words: Words) -> None:
    """Give back a beacon's read and word."""
    endpoint.release(beacon.read.number)
    words.give_back(beacon.slot)
