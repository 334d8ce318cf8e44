"""The fabric: both ends of a TCP connection, from a reader to one generation of an owner's memory.

The reader says `HELLO`, then `RECORD` after `RECORD`. The owner answers each ``READ`` with a status
byte and the bytes, and each ``END`` with a status byte, in order; after ``REVOKED`` it says no more.
Neither end ever waits: a call moves what the sockets take and have by now, up to a bound.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct

from vllm_wt.errors import CorruptTransfer, PeerDead, Revoked, TransportError, WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_echo.info import EchoHandle, error

LOOPBACK = "127.0.0.1"
HELLO = Struct("!16sQ128s")
"""The owner's secret, the generation that is to be read, the reader's name."""
RECORD = Struct("!BIQQ")
"""``READ`` with buffer, offset and length; ``END``; ``REPORT`` with the ticket as the offset."""
READ, END, REPORT = 1, 2, 3
GOOD, REVOKED = memoryview(b"\1"), memoryview(b"\2")

_CHUNK = 1 << 20  # most bytes of one READ: an answer that has begun must go to its end
_CALL_BYTES = 4 << 20  # after so many, in about a millisecond, a call stops
_MOST_PIECES = 1000  # of one system call; Linux takes 1024


def make_socket(*, listen: bool) -> socket.socket:
    """A TCP socket that never waits; it may listen on a port of its own."""
    try:
        made = socket.create_server((LOOPBACK, 0)) if listen else socket.socket()
    except OSError as cause:
        cure = "raise the limit of open files (`ulimit -n`)"
        raise error(TransportError, "No socket can be made", got=cause, cure=cure) from None
    made.setblocking(False)
    # The last bytes of a pass are few, and must not be held back until there are more.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _first(pieces: deque[memoryview]) -> list[memoryview]:
    """As many pieces as one system call should move."""
    found, nbytes = [], 0
    for piece in islice(pieces, _MOST_PIECES):
        found.append(piece)
        nbytes += len(piece)
        if nbytes >= _CALL_BYTES:
            break
    return found


def _take(pieces: deque[memoryview], nbytes: int) -> list[memoryview]:
    """Remove the first bytes, which have crossed."""
    taken = []
    while nbytes:
        piece = pieces.popleft()
        if nbytes < len(piece):
            pieces.appendleft(piece[nbytes:])
            piece = piece[:nbytes]
        taken.append(piece)
        nbytes -= len(piece)
    return taken


@dataclass(eq=False)
class OwnerEnd:
    """The owner's end. At the other one may be a stranger, until ``reader`` is known."""

    sock: socket.socket
    secret: bytes  # what a reader must show
    exposed: Mapping[int, list[memoryview] | None]  # buffers of each generation; None: revoked
    reports: dict[int, set[str]]  # of each ticket the readers that reported it; more are added
    reader: str = ""
    generation: int = -1
    _inbox: bytes = b""
    _outbox: deque[memoryview] = field(default_factory=deque)

    def drive(self) -> None:
        """Send what was asked for, then take in more requests. OSError: close the connection."""
        moved = 0
        with suppress(BlockingIOError):
            while moved < _CALL_BYTES:
                if self._outbox:
                    nbytes = self.sock.sendmsg(_first(self._outbox))
                    _take(self._outbox, nbytes)
                else:
                    nbytes = self._receive()
                moved += nbytes

    def revoke(self) -> None:
        """Send nothing of this memory from now on: an answer that has begun ends in zeros."""
        begun = self._outbox and self._outbox[0] is not GOOD
        rest = bytes(len(self._outbox[0])) if begun else b""
        self._outbox = deque([memoryview(rest), REVOKED])

    def _receive(self) -> int:
        received = self.sock.recv(1 << 16)
        if not received:
            raise ConnectionResetError("the reader has gone")
        data = self._inbox + received
        if not self.reader and len(data) >= HELLO.size:
            secret, self.generation, name = HELLO.unpack(data[: HELLO.size])
            if not secrets.compare_digest(secret, self.secret):
                raise ConnectionRefusedError("a stranger")
            self.reader = name.rstrip(b"\0").decode(errors="replace")
            if self.exposed.get(self.generation) is None:
                self.revoke()
            data = data[HELLO.size :]
        if self.reader:
            whole = len(data) // RECORD.size * RECORD.size
            for record in RECORD.iter_unpack(data[:whole]):
                self._obey(*record)
            data = data[whole:]
        self._inbox = data
        return len(received)

    def _obey(self, kind: int, buffer: int, offset: int, nbytes: int) -> None:
        buffers = self.exposed.get(self.generation)
        if kind == REPORT:
            self.reports.setdefault(offset, set()).add(self.reader)
        elif buffers is None:
            pass  # the reader is being told
        elif kind == END:
            self._outbox.append(GOOD)
        else:
            memory = buffers[buffer] if buffer < len(buffers) else GOOD[:0]
            if kind != READ or not 0 < nbytes <= min(_CHUNK, len(memory) - offset):
                raise ConnectionRefusedError("a request that makes no sense")
            self._outbox += GOOD, memory[offset : offset + nbytes]


class ReaderEnd:
    """The reader's end, for one pass at a time. Once it has failed, it stays so."""

    def __init__(self, handle: EchoHandle, reader: str) -> None:
        self.sizes = handle.sizes
        self.missing = 0  # bytes that were asked for and have not landed
        self.awaited: deque[memoryview] = deque()  # where what the owner has yet to say goes
        self._where = f"owner {handle.owner!r}, generation {handle.generation}"
        self._status = memoryview(bytearray(GOOD))  # all land here; none comes after REVOKED
        self._failure: tuple[type[WeightTransferError], str] | None = None
        secret = bytes.fromhex(handle.secret)
        self._outbox = bytearray(HELLO.pack(secret, handle.generation, reader.encode()))
        self.sock = make_socket(listen=False)
        self.sock.connect_ex((LOOPBACK, handle.port))  # `drive` will tell how it went

    def read(self, copies: Sequence[Copy], buffers: Sequence[memoryview]) -> None:
        """Ask for copies into buffers."""
        for copy in copies:
            target = buffers[copy.target][copy.target_offset :][: copy.nbytes]
            for start in range(0, copy.nbytes, _CHUNK):
                piece = target[start : start + _CHUNK]
                at = copy.source_offset + start
                self._outbox += RECORD.pack(READ, copy.source, at, len(piece))
                self.awaited += self._status, piece
            self.missing += copy.nbytes

    def confirm(self) -> None:
        """Ask whether the memory is still exposed."""
        self._outbox += RECORD.pack(END, 0, 0, 0)
        self.awaited.append(self._status)

    def report(self, ticket: int) -> None:
        """Tell at once that all of a ticket is here: there may be no other call."""
        self._outbox += RECORD.pack(REPORT, 0, ticket, 0)
        self.drive()

    def drive(self) -> None:
        """Move what can be moved now; raise when the connection has failed, now or before."""
        self.require_up()
        try:
            with suppress(BlockingIOError):
                while self._outbox:
                    del self._outbox[: self.sock.send(self._outbox)]
            with suppress(BlockingIOError):
                self._receive()
        except OSError as cause:
            self._failure = PeerDead, f"The owner has gone: {cause}"
        self.require_up()

    def require_up(self) -> None:
        if self._failure is not None:
            cure = "connect anew with the owner's newest handle, or to a new owner"
            raise error(*self._failure, where=self._where, cure=cure)

    def _receive(self) -> None:
        received = 0
        while self.awaited and not self._failure and received < _CALL_BYTES:
            nbytes = self.sock.recvmsg_into(_first(self.awaited))[0]
            if not nbytes:
                raise ConnectionResetError("it has closed the connection")
            received += nbytes
            landed = _take(self.awaited, nbytes)
            self.missing -= sum(len(piece) for piece in landed if piece is not self._status)
            if self._status == REVOKED:
                self._failure = Revoked, "The owner does not expose this memory any more"
            elif self._status != GOOD:
                self._failure = CorruptTransfer, "The owner says what makes no sense"
