"""What an owner and a reader say to each other over their connection, as bytes.

The owner begins, with a `Challenge`. A reader says `Hello`, is answered by a `Welcome`, and both make
a pair by what they tell each other in `Key`. A plan is told once. A pass is a `Begin`; the owner says
`Sending` before each bucket that it sends, never more of them than it was told to, and then `End`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from itertools import islice
from typing import ClassVar, TypeAlias

NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
"""What endpoints may be called."""
SECRET_BYTES = 32
"""Length of a generation's secret."""
NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
STRANGERS_BYTES = 1 << 10
"""Longest message of somebody who has not shown yet that he knows the secret."""
MAX_BYTES = 8 << 20
"""Longest message."""
MAX_ROWS = 1 << 18
"""Most rows of a plan."""
MAX_TEXT = 1 << 14
"""Longest error that is told."""

_HELLO = struct.Struct(f"!{PROOF_BYTES}s{NONCE_BYTES}sQdB")
_WELCOME = struct.Struct(f"!B{PROOF_BYTES}s")
_KEY = struct.Struct("!H")
_PLAN = struct.Struct("!II")
_ROW = struct.Struct("!IQQ")


class Status(IntEnum):
    """How a ``Hello`` or a pass has ended; one byte."""

    GOOD = 1
    REVOKED = 2
    STOPPED = 3


class Fabric(IntEnum):
    """What carries the bytes of a pair; one byte."""

    GLOO = 1
    NCCL = 2


@dataclass(frozen=True)
class Challenge:
    """Of the owner: what a reader's proof is made of, so that nobody can say it again."""

    nonce: bytes
    kind: ClassVar[int] = 1

    def body(self) -> bytes:
        return self.nonce

    @classmethod
    def parsed(cls, body: bytes) -> Challenge | None:
        return cls(body) if len(body) == NONCE_BYTES else None


@dataclass(frozen=True)
class Hello:
    """Of a reader: who is there, what it wants, and in how many seconds the pair must be made."""

    nonce: bytes
    generation: int
    seconds: float
    fabric: int
    name: str
    proof: bytes = field(default=b"\0" * PROOF_BYTES, compare=False)
    kind: ClassVar[int] = 2

    def proven(self, secret: bytes, challenge: bytes) -> bytes:
        """The proof that whoever says this knows the secret."""
        return hmac.digest(secret, b"reader" + challenge + self.body()[PROOF_BYTES:], "sha256")

    def body(self) -> bytes:
        head = (self.proof, self.nonce, self.generation, self.seconds, self.fabric)
        return _HELLO.pack(*head) + self.name.encode()

    @classmethod
    def parsed(cls, body: bytes) -> Hello | None:
        name = body[_HELLO.size :]
        if len(body) < _HELLO.size or not name.isascii() or not NAME.fullmatch(name.decode()):
            return None
        proof, nonce, generation, seconds, fabric = _HELLO.unpack_from(body)
        if fabric not in list(Fabric) or not 0 < seconds < 1e6:
            return None
        return cls(nonce, generation, seconds, fabric, name.decode(), proof)


@dataclass(frozen=True)
class Welcome:
    """Of the owner: whether that generation can be read, and that it knows the secret itself."""

    status: int
    proof: bytes
    kind: ClassVar[int] = 3

    @staticmethod
    def proven(secret: bytes, nonce: bytes, status: int) -> bytes:
        return hmac.digest(secret, b"owner" + nonce + bytes([status]), "sha256")

    def body(self) -> bytes:
        return _WELCOME.pack(self.status, self.proof)

    @classmethod
    def parsed(cls, body: bytes) -> Welcome | None:
        return cls(*_WELCOME.unpack(body)) if len(body) == _WELCOME.size else None


@dataclass(frozen=True)
class Key:
    """What one side's library leaves for the other's, while they make the pair."""

    key: str
    value: bytes
    kind: ClassVar[int] = 4

    def body(self) -> bytes:
        key = self.key.encode()
        return _KEY.pack(len(key)) + key + self.value

    @classmethod
    def parsed(cls, body: bytes) -> Key | None:
        if len(body) < _KEY.size:
            return None
        end = _KEY.size + _KEY.unpack_from(body)[0]
        key = body[_KEY.size : end]
        if len(body) < end or not key.isascii():
            return None
        return cls(key.decode(), body[end:])


@dataclass(frozen=True)
class Ready:
    """Of the owner: its half of the pair is made."""

    kind: ClassVar[int] = 5

    def body(self) -> bytes:
        return b""

    @classmethod
    def parsed(cls, body: bytes) -> Ready | None:
        return None if body else cls()


@dataclass(frozen=True)
class Failed:
    """Of the owner: why it serves this reader no more, as `vllm_wt.errors.to_text` has it."""

    text: str
    kind: ClassVar[int] = 6

    def body(self) -> bytes:
        return self.text.encode()[:MAX_TEXT]

    @classmethod
    def parsed(cls, body: bytes) -> Failed | None:
        return cls(body.decode(errors="replace")) if len(body) <= MAX_TEXT else None


Row: TypeAlias = tuple[int, int, int]
"""A run of bytes of the owner's: buffer, offset, bytes."""


@dataclass(frozen=True)
class Plan:
    """Of a reader: what each bucket consists of, under a number that a pass names it by."""

    number: int
    buckets: tuple[tuple[Row, ...], ...]
    kind: ClassVar[int] = 7

    def body(self) -> bytes:
        counts = [len(rows) for rows in self.buckets]
        head = _PLAN.pack(self.number, len(counts)) + struct.pack(f"!{len(counts)}I", *counts)
        return head + b"".join(_ROW.pack(*row) for rows in self.buckets for row in rows)

    @classmethod
    def parsed(cls, body: bytes) -> Plan | None:
        if len(body) < _PLAN.size:
            return None
        number, count = _PLAN.unpack_from(body)
        start = _PLAN.size + 4 * count
        if not 0 < count <= MAX_ROWS or len(body) < start:
            return None
        counts: Sequence[int] = struct.unpack_from(f"!{count}I", body, _PLAN.size)
        packed = memoryview(body)[start:]
        if min(counts) < 1 or sum(counts) > MAX_ROWS or len(packed) != sum(counts) * _ROW.size:
            return None
        rows = _ROW.iter_unpack(packed)
        return cls(number, tuple(tuple(islice(rows, each)) for each in counts))


@dataclass(frozen=True)
class _OfNumbers:
    """A message of numbers alone, in the order of its fields."""

    form: ClassVar[struct.Struct]

    def body(self) -> bytes:
        return self.form.pack(*astuple(self))


@dataclass(frozen=True)
class Forget(_OfNumbers):
    """Of a reader: a plan is used no more."""

    number: int
    kind: ClassVar[int] = 8
    form: ClassVar[struct.Struct] = struct.Struct("!I")


@dataclass(frozen=True)
class Begin(_OfNumbers):
    """Of a reader: a pass over a plan, of which the first ``until`` buckets may come."""

    number: int
    plan: int
    until: int
    kind: ClassVar[int] = 9
    form: ClassVar[struct.Struct] = struct.Struct("!QII")


@dataclass(frozen=True)
class Go(_OfNumbers):
    """Of a reader: now there is room for the first ``until`` buckets of a pass."""

    number: int
    until: int
    kind: ClassVar[int] = 10
    form: ClassVar[struct.Struct] = struct.Struct("!QI")


@dataclass(frozen=True)
class Stop(_OfNumbers):
    """Of a reader: a pass is given up; what was sent of it is received, and left."""

    number: int
    kind: ClassVar[int] = 11
    form: ClassVar[struct.Struct] = struct.Struct("!Q")


@dataclass(frozen=True)
class Report(_OfNumbers):
    """Of a reader: it has all bytes of a ticket."""

    ticket: int
    kind: ClassVar[int] = 12
    form: ClassVar[struct.Struct] = struct.Struct("!Q")


@dataclass(frozen=True)
class Sending(_OfNumbers):
    """Of the owner: it sends this bucket of a pass next."""

    number: int
    bucket: int
    kind: ClassVar[int] = 13
    form: ClassVar[struct.Struct] = struct.Struct("!QI")


@dataclass(frozen=True)
class End(_OfNumbers):
    """Of the owner: it sends no more of a pass."""

    number: int
    status: int
    kind: ClassVar[int] = 14
    form: ClassVar[struct.Struct] = struct.Struct("!QB")


Message: TypeAlias = (
    Challenge
    | Hello
    | Welcome
    | Key
    | Ready
    | Failed
    | Plan
    | Forget
    | Begin
    | Go
    | Stop
    | Report
    | Sending
    | End
)
_OF_FORM = {each.kind: each for each in (Forget, Begin, Go, Stop, Report, Sending, End)}
_OTHERS = {each.kind: each for each in (Challenge, Hello, Welcome, Key, Ready, Failed, Plan)}


def unpack(kind: int, body: bytes) -> Message | None:
    """A message of a peer's; None when it is none."""
    if (other := _OTHERS.get(kind)) is not None:
        return other.parsed(body)
    numbers = _OF_FORM.get(kind)
    if numbers is None or len(body) != numbers.form.size:
        return None
    return numbers(*numbers.form.unpack(body))
