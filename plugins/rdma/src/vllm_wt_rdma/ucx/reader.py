"""A reader's end: its connection to an owner, a prepared plan, and one pass over it."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import CorruptTransfer, PeerDead, Revoked, WeightTransferError, WrongOrder
from vllm_wt.transport import Progress
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.ucx import memory
from vllm_wt_rdma.ucx.batching import CHUNK_BYTES, Batch
from vllm_wt_rdma.ucx.fabric import Fabric
from vllm_wt_rdma.ucx.info import UcxHandle
from vllm_wt_rdma.ucx.lifeline import ReaderLine
from vllm_wt_rdma.ucx.memory import Region, Spare
from vllm_wt_rdma.ucx.messages import (
    ID_BYTES,
    REQUEST_TAG,
    Begin,
    Hello,
    Range,
    Report,
    Status,
    Stop,
    pack,
    pack_hello,
    pack_ranges,
    pack_read,
)

_OPEN_POLL_S = 0.0005
_CALL_S = 0.02
"""Most seconds of one poll, beyond the message that UCX copies in it."""
_QUIET_S = 0.002
"""A poll waits so long for the next thing to happen: an owner looks at least every millisecond."""
_SPIN_S = 0.0003
"""Nothing has come for so long, and it naps between two looks: whoever verifies what has come needs the
core, and Python's lock."""
_NAP_S = 0.00005
_SAY_S = 0.0002
"""For what is said, to leave."""
_DRAIN_S = 0.05
"""Seconds that a cancelled pass gets to receive what it has asked for; the transport can go on then."""
_IN_FLIGHT_BYTES = 4 * CHUNK_BYTES
_IN_FLIGHT = 32
"""Most messages, and bytes of them, that are asked for and have not come."""


class Tags:
    """Tags of answers: no two alike, and none that a stranger would know."""

    def __init__(self) -> None:
        self._base = 1 << 63 | secrets.randbits(31) << 32  # never REQUEST_TAG, without that bit
        self._numbers = itertools.count(1)

    def take(self) -> int:
        return self._base | (next(self._numbers) & 0xFFFFFFFF)


class Answer:
    """The status that an owner will send to a tag."""

    def __init__(self, fabric: Fabric, tag: int) -> None:
        self._fabric = fabric
        self._byte = bytearray(1)
        self.tag = tag
        self.number = fabric.receive_bytes(self._byte, tag)

    def come(self) -> bool:
        """Whether it has come; to be asked until it has, and then no more."""
        return self._fabric.done(self.number)

    def require_good(self, handle: UcxHandle) -> None:
        """Of one that has come.

        Raises:
            Revoked, CorruptTransfer: It says so, or makes no sense.
        """
        if self._byte[0] == Status.GOOD:
            return
        revoked = self._byte[0] == Status.REVOKED
        raise (Revoked if revoked else CorruptTransfer)(
            f"Owner {handle.owner!r} "
            + ("doesn't expose this memory any more" if revoked else "says what makes no sense"),
            backend=BACKEND,
            where="read",
            expected=f"generation {handle.generation}",
            got="revoked" if revoked else self._byte[0],
            cure="open the owner's new handle",
        )


class Connection:
    """To one generation of an owner's memory.

    Args:
        fabric: Which messages come and go by.
        handle: The owner's, checked.
        tags: For its answers.

    Raises:
        PeerDead: The owner is gone.
        CorruptTransfer: UCX can't read its address.
    """

    def __init__(self, fabric: Fabric, handle: UcxHandle, tags: Tags) -> None:
        self.handle = handle
        self.session = secrets.token_bytes(ID_BYTES)
        self._fabric = fabric
        self._tags = tags
        self._line = ReaderLine(handle.host, handle.lifeline, self.session)
        try:
            self.require_up()
            self._peer = fabric.connect(handle.worker_address)
        except BaseException:
            self._line.close()
            raise

    def greet(self, reader: str, deadline: Deadline, drive: Callable[[], bool]) -> None:
        """Say who is there, and wait until the owner has answered.

        Args:
            reader: Our name.
            deadline: For the answer.
            drive: Drives the fabric once.

        Raises:
            PeerDead: The owner is gone.
            Revoked: It doesn't expose the generation any more.
            Timeout: It has not answered.
        """
        answer = Answer(self._fabric, self._tags.take())
        try:
            hello = Hello(
                self.session, self.handle.generation, answer.tag, reader, self._fabric.address
            )
            self._say(pack_hello(hello, bytes.fromhex(self.handle.nonce)))
            while not answer.come():
                deadline.check(
                    f"Owner {self.handle.owner!r} has not answered",
                    where="open",
                    got="no answer: it is stopped, doesn't poll, is out of reach, or another process",
                )
                self.require_up()
                if not drive():
                    deadline.wait(_OPEN_POLL_S)
        except BaseException:
            self._fabric.forget(answer.number)
            raise
        answer.require_good(self.handle)

    def require_up(self) -> None:
        """Raise :class:`PeerDead` once the owner is known to have gone."""
        cut = self._line.is_cut()
        if cut or (hasattr(self, "_peer") and not self._fabric.alive(self._peer)):
            raise PeerDead(
                f"Owner {self.handle.owner!r} has gone",
                backend=BACKEND,
                where=f"generation {self.handle.generation}",
                got="its process has ended, or serves us no more" if cut else "UCX has lost it",
                cure="look at the owner's log; connect anew with its newest handle",
            )

    def report(self, ticket: int, drive: Callable[[], bool]) -> None:
        """Tell that all of a ticket is here, at once: there may be no other call.

        Raises:
            PeerDead: The owner is gone.
        """
        self.require_up()
        self.say(Report(self.session, ticket))
        end = time.monotonic() + _SAY_S
        while time.monotonic() < end:
            drive()

    def say(self, request: Begin | Stop | Report) -> None:
        self._say(pack(request))

    def ask(self, tag: int, answer: int, packed: bytes) -> None:
        """Ask for a message of a pass."""
        self._say(pack_read(self.session, tag, answer, packed))

    def close(self) -> None:
        self._line.close()
        self._fabric.close_peer(self._peer)

    def _say(self, request: bytes) -> None:
        self._fabric.say(self._peer, request, REQUEST_TAG)


@dataclass(frozen=True, eq=False)
class Planned:
    """One message of a plan: what is asked for, and where it goes, in the order of its bytes."""

    packed: bytes
    places: tuple[Range, ...]
    nbytes: int


@dataclass(eq=False)
class Plan:
    """Copies that were checked, as messages of each connection."""

    region: Region
    messages: dict[Connection, list[Planned]] = field(default_factory=dict)
    nbytes: int = 0
    busy: bool = False

    def add(self, connection: Connection, batches: Sequence[Batch]) -> None:
        for batch in batches:
            ranges = tuple(Range(c.source, c.source_offset, c.nbytes) for c in batch.copies)
            planned = Planned(pack_ranges(ranges), _places(batch), batch.nbytes)
            self.messages.setdefault(connection, []).append(planned)
            self.nbytes += batch.nbytes


def _places(batch: Batch) -> tuple[Range, ...]:
    """Where a message goes; places that adjoin are one, which it can be received in as it is."""
    joined: list[Range] = []
    for copy in batch.copies:
        place = Range(copy.target, copy.target_offset, copy.nbytes)
        if joined and place.buffer == joined[-1].buffer and place.offset == joined[-1].end:
            joined[-1] = replace(joined[-1], nbytes=joined[-1].nbytes + place.nbytes)
        else:
            joined.append(place)
    return tuple(joined)


@dataclass(eq=False)
class _Coming:
    """A message that was asked for; ``whole`` is where it lands, to be put in its places."""

    number: int
    planned: Planned
    whole: torch.Tensor | None


class _Part:
    """A pass's share of one owner.

    Args:
        fabric: Which messages come and go by.
        connection: To the owner.
        region: Where it goes.
        messages: What is read.
        tags: For its answers.
        spare: Where what was gathered lands.
    """

    def __init__(
        self,
        fabric: Fabric,
        connection: Connection,
        region: Region,
        messages: Sequence[Planned],
        tags: Tags,
        spare: Spare,
    ) -> None:
        self.landed = 0
        self._fabric = fabric
        self._connection = connection
        self._region = region
        self._left = deque(messages)
        self._tags = tags
        self._spare = spare
        self._good = False
        self._coming: deque[_Coming] = deque()
        self._pending = 0
        """Bytes of what is coming."""
        self._status = Answer(fabric, tags.take())
        connection.say(Begin(connection.session, self._status.tag, len(messages)))

    @property
    def done(self) -> bool:
        """Whether the owner has said that it was good, and all has landed."""
        return self._good and not self._left and not self._coming

    def advance(self) -> bool:
        """Take in what has come and ask for what fits; whether anything happened."""
        before = self.landed
        self._take_in()
        while self._left and self._fits(self._left[0]):
            self._ask(self._left.popleft())
        if not self._good and self._status.come():
            self._status.require_good(self._connection.handle)
            self._good = True
        return self.landed > before or self.done

    def require_up(self) -> None:
        """Raise :class:`PeerDead` once the owner is known to have gone."""
        self._connection.require_up()

    def stop(self) -> None:
        """Ask for nothing more, and tell the owner."""
        self._left.clear()
        self._connection.say(Stop(self._connection.session, self._status.tag))

    def _fits(self, planned: Planned) -> bool:
        return not self._coming or (
            len(self._coming) < _IN_FLIGHT and self._pending + planned.nbytes <= _IN_FLIGHT_BYTES
        )

    def _ask(self, planned: Planned) -> None:
        tag = self._tags.take()
        whole = self._spare.take(planned.nbytes) if len(planned.places) > 1 else None
        target = self._region.part(planned.places[0]) if whole is None else whole
        number = self._fabric.receive(target, tag)
        self._coming.append(_Coming(number, planned, whole))
        self._pending += planned.nbytes
        self._connection.ask(self._status.tag, tag, planned.packed)

    def _take_in(self) -> None:
        # In the order in which they were asked for, and sent. After one that has to be put in its
        # places UCX is driven again: it would carry nothing meanwhile.
        while self._coming and self._fabric.done(self._coming[0].number):
            each = self._coming.popleft()
            self.landed += each.planned.nbytes
            self._pending -= each.planned.nbytes
            if each.whole is not None:
                memory.scatter(each.whole, self._region, each.planned.places)
                self._spare.give_back(each.whole)
                return


class Operation:
    """One pass over a plan; done when the owners have said that it was good.

    Args:
        fabric: Which messages come and go by.
        plan: What is read.
        tags: For the owners' answers.
        spare: Where what was gathered lands.
    """

    def __init__(self, fabric: Fabric, plan: Plan, tags: Tags, spare: Spare) -> None:
        self.plan = plan
        self._ended = False
        self._failed = False
        self._parts = [
            _Part(fabric, connection, plan.region, messages, tags, spare)
            for connection, messages in plan.messages.items()
        ]
        plan.busy = True

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def advance(self, drive: Callable[[], bool]) -> Progress:
        """Drive the pass for some milliseconds at most.

        Raises:
            PeerDead, Revoked, CorruptTransfer: It has failed.
            WrongOrder: It had failed, or was cancelled, before.
        """
        if self._ended or self._failed:
            raise WrongOrder(
                "This pass has ended", backend=BACKEND, where="poll", cure="submit the plan again"
            )
        try:
            end = time.monotonic() + _CALL_S
            quiet = time.monotonic() + _QUIET_S
            while not self.done:
                moved = drive()
                for part in self._parts:
                    moved |= not part.done and part.advance()
                now = time.monotonic()
                if moved:
                    quiet = now + _QUIET_S
                if now > end or now > quiet:
                    break
                if now > quiet - _QUIET_S + _SPIN_S:
                    time.sleep(_NAP_S)
            for part in self._parts:
                if not part.done:
                    part.require_up()
        except BaseException:
            self._failed = True
            raise
        done = self.done
        if done:
            self.plan.busy = False
        return Progress(done, sum(part.landed for part in self._parts))

    def give_up(self, drive: Callable[[], bool]) -> bool:
        """Ask for nothing more, and receive what was asked for, for a bounded time.

        Returns:
            Whether nothing is on its way any more.
        """
        self._ended = True
        if self._failed:
            return False
        end = time.monotonic() + _DRAIN_S
        try:
            for part in self._parts:
                part.stop()
            while not self.done and time.monotonic() < end:
                drive()
                for part in self._parts:
                    if not part.done:
                        part.advance()
        except WeightTransferError:
            self._failed = True
            return False
        if self.done:
            self.plan.busy = False
        return self.done
