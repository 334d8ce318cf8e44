"""What readers and owners say to each other: each is one packet of a Unix socket.

A reader says hello, once. The owner grants, in as many packets as the descriptors need, or says that
the generation was revoked. From then on the reader reports tickets.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from vllm_wt_ipc.info import HANDLE_PROTOCOL

GRANTED = b"G"
"""With descriptors: the control page first, then the segments, in order."""
REVOKED = b"R"
MOST_DESCRIPTORS = 128
"""In a packet; Linux allows 253."""

NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
"""Names of endpoints."""

_MAGIC = b"vllm-ipc"
_HELLO = struct.Struct("!8sH16sQ128s")
_REPORT = struct.Struct("!Q")
MOST_BYTES = _HELLO.size
"""Of any packet of a reader's."""


class Hello(NamedTuple):
    """Who wants to read what.

    Args:
        nonce: Of the owner's handle.
        generation: Of its memory.
        reader: Name of the reader.
    """

    nonce: bytes
    generation: int
    reader: str

    def pack(self) -> bytes:
        return _HELLO.pack(
            _MAGIC, HANDLE_PROTOCOL, self.nonce, self.generation, self.reader.encode()
        )


def unpack_hello(packet: bytes) -> Hello | None:
    """None for anything else."""
    if len(packet) != _HELLO.size:
        return None
    magic, protocol, nonce, generation, name = _HELLO.unpack(packet)
    reader = name.rstrip(b"\0").decode("ascii", "replace")
    if (magic, protocol) != (_MAGIC, HANDLE_PROTOCOL) or not NAME.fullmatch(reader):
        return None
    return Hello(nonce, generation, reader)


def pack_report(ticket: int) -> bytes:
    return _REPORT.pack(ticket)


def unpack_report(packet: bytes) -> int | None:
    """The ticket; None for anything else."""
    return int(_REPORT.unpack(packet)[0]) if len(packet) == _REPORT.size else None
