"""A connection that messages come and go by; nothing of it blocks."""

from __future__ import annotations

import os
import socket
import struct
import weakref
from collections import deque
from contextlib import suppress

from vllm_wt_nccl.p2p.messages import Message, unpack

_HEAD = struct.Struct("!IB")
_RECEIVE = 1 << 18
_MOST_RECEIVED = 4 << 20
"""Bytes that are taken in by one call, so that it ends."""
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""A host that has gone without a word is noticed by the kernel, in seconds; a process that is stopped
is none."""

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, of a trainer's loader of data say, must not be taken for its parent."""
    for each in tuple(_open):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def not_inherited(made: socket.socket) -> None:
    """Have a socket closed in processes that are forked from this one."""
    _open.add(made)


class Garbage(Exception):
    """What a peer has said makes no sense."""


class Channel:
    """One end.

    Args:
        connected: Its socket, which is the channel's from now on.
        most: Longest message that is taken in, in bytes.

    Attributes:
        most: Likewise; may be raised.
        is_gone: Whether the other end is known to have gone, or this one was closed.
    """

    def __init__(self, connected: socket.socket, most: int) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        not_inherited(connected)
        self.most = most
        self.is_gone = False
        self._socket = connected
        self._in = bytearray()
        self._out: deque[memoryview] = deque()

    @property
    def here(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def say(self, message: Message) -> None:
        """Send as soon as there is room; any thread may."""
        body = message.body()
        self._out.append(memoryview(_HEAD.pack(len(body), message.kind) + body))

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._out and not self.is_gone:
                sent = self._socket.send(self._out[0])
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            # What has come before is still to be read: it may say why.
            self._out.clear()

    def heard(self) -> list[Message]:
        """What has come, whole messages; also that of an end that has gone since.

        Raises:
            Garbage: It is none.
        """
        self._receive()
        found: list[Message] = []
        start = 0
        while len(self._in) >= start + _HEAD.size:
            length, kind = _HEAD.unpack_from(self._in, start)
            if length > self.most:
                raise Garbage(f"a message of {length} bytes")
            end = start + _HEAD.size + length
            if len(self._in) < end:
                break
            message = unpack(kind, bytes(self._in[start + _HEAD.size : end]))
            if message is None:
                raise Garbage(f"a message of kind {kind}, {length} bytes")
            found.append(message)
            start = end
        del self._in[:start]
        return found

    def close(self) -> None:
        self.is_gone = True
        self._socket.close()

    def _receive(self) -> None:
        try:
            received = 0
            while not self.is_gone and received < _MOST_RECEIVED:
                data = self._socket.recv(_RECEIVE)
                self._in += data
                received += len(data)
                self.is_gone = not data
        except BlockingIOError:
            return
        except OSError:
            self.is_gone = True
