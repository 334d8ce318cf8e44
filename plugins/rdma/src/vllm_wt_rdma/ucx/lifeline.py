"""Tells within a host that a peer has died, at once and whatever UCX goes by: where an operator's own
settings let it use memory that peers share, it does not say.

An owner listens on a Unix socket of a random name without a file, and each of its readers connects to
it. The kernel closes both ends with their processes. Between hosts UCX itself reports dead peers.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_wt.errors import TransportError
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.ucx.messages import ID_BYTES

_WAITING = 1024
_MOST_STRANGERS = 64
"""Connections that have not said who is there; the oldest are closed."""


_open: weakref.WeakSet[OwnerLine | ReaderLine] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process, of a trainer's loader of data say, must not be taken for its parent."""
    for line in tuple(_open):
        line.close()


os.register_at_fork(after_in_child=_close_in_child)


def this_host() -> str:
    """Where names of Unix sockets are the same: a boot of a kernel, and a network of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/net').stat().st_ino}"


class OwnerLine:
    """The owner's end.

    Attributes:
        name: Which readers connect to.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(ID_BYTES)
        self._listener = _socket()
        self._listener.bind(_path(self.name))
        self._listener.listen(_WAITING)
        self._strangers: list[socket.socket] = []
        self._readers: dict[socket.socket, bytes] = {}
        _open.add(self)

    def poll(self) -> Iterator[bytes]:
        """Take in new readers; the sessions of those that are gone."""
        with suppress(OSError):  # nobody is waiting
            for _ in range(_MOST_STRANGERS):
                self._strangers.append(self._listener.accept()[0])
                self._strangers[-1].setblocking(False)
        for stranger in self._strangers[:-_MOST_STRANGERS]:
            stranger.close()
        self._strangers = [each for each in self._strangers if self._is_stranger(each)]
        for reader, session in tuple(self._readers.items()):
            if _receive(reader) is not None:  # a reader says nothing more
                reader.close()
                del self._readers[reader]
                yield session

    def cut(self, session: bytes) -> None:
        """Let a reader know that it is not served any more."""
        for reader in [each for each, known in self._readers.items() if known == session]:
            reader.close()
            del self._readers[reader]

    def close(self) -> None:
        for each in (self._listener, *self._strangers, *self._readers):
            each.close()

    def _is_stranger(self, stranger: socket.socket) -> bool:
        if stranger.fileno() < 0:
            return False
        said = _receive(stranger)
        if said is None:
            return True
        if len(said) == ID_BYTES:
            self._readers[stranger] = said
        else:
            stranger.close()
        return False


class ReaderLine:
    """A reader's end; without a connection where the owner is on another host.

    Args:
        host: The owner's :func:`this_host`.
        name: Of its `OwnerLine`.
        session: Which the owner is told has gone with this process.
    """

    def __init__(self, host: str, name: str, session: bytes) -> None:
        self._path = _path(name)
        self._session = session
        self._socket = _socket() if host == this_host() else None
        self._connected = False
        _open.add(self)

    def is_cut(self) -> bool:
        """Whether the owner is known to have gone; connects, when it has not been able to so far."""
        if self._socket is None:
            return False
        if self._connected:
            return _receive(self._socket) is not None
        failure = self._socket.connect_ex(self._path)
        if failure == 0:
            self._connected = True
            with suppress(OSError):
                self._socket.send(self._session)
        return failure not in {0, errno.EAGAIN}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _path(name: str) -> str:
    return f"\0vllm-wt-{name}"


def _socket() -> socket.socket:
    try:
        made = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise TransportError(
            "No socket can be made",
            backend=BACKEND,
            got=os.strerror(error.errno or 0),
            cure="raise the limit of open files (`ulimit -n`)",
        ) from None
    made.setblocking(False)
    return made


def _receive(connection: socket.socket) -> bytes | None:
    """What has come; nothing once the other end has gone, None while there is nothing."""
    try:
        return connection.recv(ID_BYTES + 1)
    except BlockingIOError:
        return None
    except OSError:
        return b""
