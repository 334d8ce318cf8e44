"""The owner's end: takes in requests, and answers them with the bytes that are asked for."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_wt.errors import PeerDead, WeightTransferError
from vllm_wt_rdma.tickets import Tickets, message
from vllm_wt_rdma.ucx import memory
from vllm_wt_rdma.ucx.batching import CHUNK_BYTES, GATHER_BYTES
from vllm_wt_rdma.ucx.exposures import Exposure, Exposures
from vllm_wt_rdma.ucx.fabric import Fabric
from vllm_wt_rdma.ucx.lifeline import OwnerLine
from vllm_wt_rdma.ucx.memory import Region
from vllm_wt_rdma.ucx.messages import (
    MAX_BYTES,
    REQUEST_TAG,
    Begin,
    Hello,
    Read,
    Report,
    Status,
    Stop,
    unpack,
)

_CALL_S = 0.02
"""Most seconds of one :meth:`Owner.serve`."""
_QUIET_S = 0.001
"""It waits so long for more to do once something was done: readers go on within microseconds, and begin
another pass, whereas it may be as long until the next call."""
_SPIN_S = 0.0003
"""Nothing to do for so long, and it naps: long messages are carried by both sides, in pieces, and are
slow where one of them sleeps; but whoever verifies what has come needs the core, too."""
_NAP_S = 0.00005
_RELEASE_S = 0.1
"""Seconds that readers get to take what is on its way of memory that is to be freed."""
_MOST_SESSIONS = 1 << 12
_MOST_PASSES = 64
"""Of one session at a time."""
_MOST_READS = 1 << 20
"""Of one pass: core's plans have a few hundred."""
_MOST_COMING = 64
"""Requests that have not arrived whole."""
_MOST_GATHERED = 4
"""Messages of one session that are gathered and have not left."""


@dataclass(eq=False)
class _Sending:
    """A message on its way: of a region's memory, or of a buffer that it was gathered in."""

    number: int
    region: Region | None
    gathered: torch.Tensor | None


@dataclass(eq=False)
class _Pass:
    """One pass of a reader over the memory that its session was opened for."""

    tag: int
    count: int
    answered: int = 0
    lost: bool = False
    """Whether memory that it asks for is no longer where it was exposed."""
    waiting: deque[Read] = field(default_factory=deque)
    sending: list[_Sending] = field(default_factory=list)


@dataclass(eq=False)
class _Session:
    peer: int
    name: str
    exposure: Exposure
    passes: dict[int, _Pass] = field(default_factory=dict)

    @property
    def sending(self) -> list[_Sending]:
        return [each for one in self.passes.values() for each in one.sending]


class Owner:
    """Serves all readers of one transport.

    Args:
        fabric: Which messages come and go by.
        device: Where bytes are gathered.
        exposures: What may be read.

    Attributes:
        tickets: What readers have reported.
        garbage: How many messages were none of ours, and dropped.
    """

    def __init__(self, fabric: Fabric, device: torch.device, exposures: Exposures) -> None:
        self.tickets = Tickets()
        self.garbage = 0
        self._fabric = fabric
        self._spare = memory.Spare(device, GATHER_BYTES)
        self._exposures = exposures
        self._line: OwnerLine | None = None
        self._sessions: dict[bytes, _Session] = {}
        self._coming: list[tuple[int, bytearray]] = []

    @property
    def lifeline(self) -> str:
        """Name of the line that readers of this host hold on to."""
        if self._line is None:
            self._line = OwnerLine()
        return self._line.name

    def serve(self) -> None:
        """Do what there is to do, for some milliseconds at most."""
        if self._line is not None:
            for session in self._line.poll():
                self._close(session)
        now = time.monotonic()
        end = now + _CALL_S
        quiet = spin = now
        while now < end:
            moved = self.step()
            now = time.monotonic()
            if moved:
                spin = now + _SPIN_S
            if moved or self._is_busy:
                quiet = now + _QUIET_S
            elif now >= quiet:
                return
            if now > spin:
                time.sleep(_NAP_S)

    def step(self) -> bool:
        """Drive the fabric once, take in what has come, answer what can be answered."""
        moved = self._fabric.drive()
        moved |= self._take_in()
        for identity, session in tuple(self._sessions.items()):
            if not self._fabric.alive(session.peer):
                self._close(identity)
                continue
            try:
                for one in tuple(session.passes.values()):
                    moved |= self._advance(session, one)
            except PeerDead:  # since it was asked whether it lives
                self._close(identity)
        return moved

    def release(self, region: Region) -> None:
        """End every send of a region's memory, which was revoked: readers that have not taken what
        is on its way within moments are disconnected."""
        if not self._fabric.ended(self._numbers(region), _RELEASE_S):
            for identity, session in tuple(self._sessions.items()):
                if any(each.region is region for each in session.sending):
                    self._close(identity)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._sessions.clear()

    @property
    def _is_busy(self) -> bool:
        return any(session.passes for session in self._sessions.values())

    def _numbers(self, region: Region) -> list[int]:
        return [
            each.number
            for session in self._sessions.values()
            for each in session.sending
            if each.region is region
        ]

    def _take_in(self) -> bool:
        """Receive requests; drop at once what can't be one."""
        moved = False
        while len(self._coming) < _MOST_COMING and (found := self._fabric.arrived()) is not None:
            tag, nbytes = found
            moved = True
            if tag == REQUEST_TAG and 0 < nbytes <= MAX_BYTES:
                buffer = bytearray(nbytes)
                self._coming.append((self._fabric.receive_bytes(buffer, tag), buffer))
            else:
                self.garbage += 1
                self._fabric.drop(tag)
        coming, self._coming = self._coming, []
        for number, buffer in coming:
            try:
                if not self._fabric.done(number):
                    self._coming.append((number, buffer))
                elif not self._obey(bytes(buffer)):
                    self.garbage += 1
            except WeightTransferError:  # whoever sent it has gone
                self.garbage += 1
        return moved

    def _obey(self, data: bytes) -> bool:
        """Whether a request makes sense."""
        request = unpack(data)
        if isinstance(request, Hello):
            return self._greet(request)
        session = None if request is None else self._sessions.get(request.session)
        if session is None:
            return False
        if isinstance(request, Report):
            self.tickets.add({session.name: [message(session.name, request.ticket)]})
            return True
        if isinstance(request, Begin):
            fits = len(session.passes) < _MOST_PASSES and 0 < request.count <= _MOST_READS
            if fits and request.tag not in (REQUEST_TAG, *session.passes):
                session.passes[request.tag] = _Pass(request.tag, request.count)
                return True
            return False
        if isinstance(request, Read):
            return self._note(session, request)
        if isinstance(request, Stop):
            if (one := session.passes.get(request.tag)) is not None:
                one.count = one.answered + len(one.waiting)
            return True  # the pass may have ended meanwhile
        return False

    def _greet(self, hello: Hello) -> bool:
        exposure = self._exposures.find(hello)
        if exposure is None or hello.session in self._sessions or hello.tag == REQUEST_TAG:
            return False
        if len(self._sessions) >= _MOST_SESSIONS:
            return False
        peer = self._fabric.connect(hello.address)
        self._sessions[hello.session] = _Session(peer, hello.name, exposure)
        self._say(peer, Status.REVOKED if exposure.region is None else Status.GOOD, hello.tag)
        return True

    def _note(self, session: _Session, read: Read) -> bool:
        """Have a read answered, if it asks for what there is."""
        one, region = session.passes.get(read.tag), session.exposure.region
        if one is None or region is None:
            return True  # the reader is being told
        sizes = region.sizes
        inside = all(
            each.buffer < len(sizes) and 0 < each.nbytes <= sizes[each.buffer] - each.offset
            for each in read.ranges
        )
        most = CHUNK_BYTES if len(read.ranges) == 1 else GATHER_BYTES
        if (
            not inside
            or sum(each.nbytes for each in read.ranges) > most
            or one.answered + len(one.waiting) >= one.count
            or read.answer == REQUEST_TAG
        ):
            return False
        one.waiting.append(read)
        return True

    def _advance(self, session: _Session, one: _Pass) -> bool:
        """Send what was asked for, and the pass's status at its end."""
        moved = False
        for each in tuple(one.sending):
            if self._is_sent(each):
                one.sending.remove(each)
                if each.gathered is not None:
                    self._spare.give_back(each.gathered)
                moved = True
        region = None if one.lost else session.exposure.region
        while one.waiting and region is not None and self._may_gather(session):
            read = one.waiting.popleft()
            if not region.has(read.ranges):
                one.lost, region = True, None
                break
            one.sending.append(self._send(session.peer, region, read))
            one.answered += 1
            moved = True
            if one.sending[-1].gathered is not None:
                break  # UCX is to be driven in between
        if region is None:
            one.waiting.clear()
        if not one.sending and (region is None or one.answered == one.count):
            self._say(session.peer, Status.REVOKED if region is None else Status.GOOD, one.tag)
            del session.passes[one.tag]
            moved = True
        return moved

    def _may_gather(self, session: _Session) -> bool:
        return sum(each.gathered is not None for each in session.sending) < _MOST_GATHERED

    def _send(self, peer: int, region: Region, read: Read) -> _Sending:
        if len(read.ranges) == 1:
            part = region.part(read.ranges[0])
            return _Sending(self._fabric.send(peer, part, read.answer), region, None)
        whole = self._spare.take(sum(each.nbytes for each in read.ranges))
        memory.gather(whole, region, read.ranges)
        return _Sending(self._fabric.send(peer, whole, read.answer), None, whole)

    def _is_sent(self, sending: _Sending) -> bool:
        try:
            return self._fabric.done(sending.number)
        except WeightTransferError:  # the reader has gone, as `alive` will tell
            return True

    def _say(self, peer: int, status: Status, tag: int) -> None:
        self._fabric.say(peer, bytes([status]), tag)

    def _close(self, identity: bytes) -> None:
        """Forget a reader that has gone, or is to go."""
        session = self._sessions.pop(identity, None)
        if session is not None:
            if self._line is not None:
                self._line.cut(identity)
            self._fabric.close_peer(session.peer)
            self._fabric.ended(each.number for each in session.sending)
