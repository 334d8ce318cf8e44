"""What readers ask of owners, as bytes; an owner's answers are one `Status`, or the bytes asked for.

A reader says ``Hello`` once. A pass is a ``Begin``, then a ``Read`` for each message of data, which may
overtake each other; the owner answers each with one message under the tag that it names, and the pass
with a status once all are answered, or once the memory is revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct

REQUEST_TAG = 0x766C6C6D77740001
"""Tag of all requests. An answer's tag is the reader's choice, and has the highest bit, unlike this."""
NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
"""What endpoints may be called."""
MAX_BYTES = 1 << 17
"""Longest request that an owner takes in; a ``Hello`` carries UCX's address of the reader."""
MAX_RANGES = 380
"""Most ranges of one ``Read``, which keep it below the 8 KiB that UCX sends at once."""
ID_BYTES = 16
"""Length of a session's identity, and of a nonce."""

_HEAD = Struct("!B16s")
_HELLO = Struct("!QQB")
_PROOF_BYTES = hashlib.sha256().digest_size
_BEGIN = Struct("!QI")
_READ = Struct("!QQ")
_NUMBER = Struct("!Q")
_RANGE = Struct("!IQQ")


class Status(IntEnum):
    """How a ``Hello`` or a pass has ended; one byte."""

    GOOD = 1
    REVOKED = 2


class _Kind(IntEnum):
    HELLO = 1
    BEGIN = 2
    READ = 3
    STOP = 4
    REPORT = 5


@dataclass(frozen=True)
class Range:
    """Bytes of one of a side's buffers."""

    buffer: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Hello:
    """Who is there, by name; which generation it wants; where answers go.

    All of it is signed with the generation's nonce, so UCX is given no address, which it may crash
    over, but of somebody who was told of this memory.
    """

    session: bytes
    generation: int
    tag: int
    name: str
    address: bytes
    proof: bytes = field(default=b"", compare=False)

    def signed(self, nonce: bytes) -> bytes:
        """The proof that whoever says this knows the nonce."""
        return hmac.digest(nonce, self.session + self.body(), "sha256")

    def body(self) -> bytes:
        """All but the session and the proof."""
        name = self.name.encode()
        return _HELLO.pack(self.generation, self.tag, len(name)) + name + self.address


@dataclass(frozen=True)
class Begin:
    """A pass of ``count`` reads, whose status goes to ``tag``."""

    session: bytes
    tag: int
    count: int


@dataclass(frozen=True)
class Read:
    """One message of a pass: these ranges, one behind the other, to ``answer``."""

    session: bytes
    tag: int
    answer: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Stop:
    """A pass is given up: no more reads of it will come."""

    session: bytes
    tag: int


@dataclass(frozen=True)
class Report:
    """The reader has all bytes of a ticket."""

    session: bytes
    ticket: int


Message = Hello | Begin | Read | Stop | Report


def pack_ranges(ranges: tuple[Range, ...]) -> bytes:
    """The part of a ``Read`` that is the same in each pass."""
    return b"".join(_RANGE.pack(each.buffer, each.offset, each.nbytes) for each in ranges)


def pack_read(session: bytes, tag: int, answer: int, packed: bytes) -> bytes:
    """A ``Read`` of ranges that are packed."""
    return _HEAD.pack(_Kind.READ, session) + _READ.pack(tag, answer) + packed


def pack_hello(hello: Hello, nonce: bytes) -> bytes:
    """A ``Hello`` with its proof."""
    return _HEAD.pack(_Kind.HELLO, hello.session) + hello.signed(nonce) + hello.body()


def pack(message: Begin | Stop | Report) -> bytes:
    """Any other request; :func:`unpack` is the inverse."""
    if isinstance(message, Begin):
        kind, body = _Kind.BEGIN, _BEGIN.pack(message.tag, message.count)
    elif isinstance(message, Stop):
        kind, body = _Kind.STOP, _NUMBER.pack(message.tag)
    else:
        kind, body = _Kind.REPORT, _NUMBER.pack(message.ticket)
    return _HEAD.pack(kind, message.session) + body


def unpack(data: bytes) -> Message | None:
    """A request from a peer's bytes; None when they are none."""
    if len(data) < _HEAD.size:
        return None
    kind, session = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if kind == _Kind.READ:
        return _unpack_read(session, body)
    if kind == _Kind.HELLO:
        return _unpack_hello(session, body)
    if kind == _Kind.BEGIN and len(body) == _BEGIN.size:
        return Begin(session, *_BEGIN.unpack(body))
    if kind == _Kind.STOP and len(body) == _NUMBER.size:
        return Stop(session, *_NUMBER.unpack(body))
    if kind == _Kind.REPORT and len(body) == _NUMBER.size:
        return Report(session, *_NUMBER.unpack(body))
    return None


def _unpack_read(session: bytes, body: bytes) -> Read | None:
    packed = body[_READ.size :]
    count, rest = divmod(len(packed), _RANGE.size)
    if len(body) < _READ.size or rest or not 1 <= count <= MAX_RANGES:
        return None
    ranges = tuple(Range(*fields) for fields in _RANGE.iter_unpack(packed))
    tag, answer = _READ.unpack_from(body)
    return Read(session, tag, answer, ranges)


def _unpack_hello(session: bytes, body: bytes) -> Hello | None:
    proof, body = body[:_PROOF_BYTES], body[_PROOF_BYTES:]
    if len(body) < _HELLO.size:
        return None
    generation, tag, length = _HELLO.unpack_from(body)
    name, address = body[_HELLO.size :][:length], body[_HELLO.size + length :]
    if len(name) < length or not name.isascii() or not NAME.fullmatch(name.decode()) or not address:
        return None
    return Hello(session, generation, tag, name.decode(), address, proof)
