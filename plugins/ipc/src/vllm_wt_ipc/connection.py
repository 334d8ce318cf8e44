"""A reader's end: one owner's memory, mapped, and whether it may still be read."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead, Revoked, Timeout, TransportError, WeightTransferError
from vllm_wt_ipc import BACKEND, memory
from vllm_wt_ipc.control import ControlWord
from vllm_wt_ipc.info import IpcHandle
from vllm_wt_ipc.messages import MOST_DESCRIPTORS, REVOKED, Hello, pack_report

_POLL_S = 0.0005
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """An open owner.

    Args:
        handle: The owner's, decoded.
        reader: Name of this side.
        deadline: For the owner's answer.

    Attributes:
        owner: The owner's name.
        segments: Its host memory.
        buffers: What can be read, in the order of the owner's region; the transport sets it.

    Raises:
        PeerDead: The owner is gone.
        Revoked: It doesn't expose this generation any more.
        Timeout: It is stopped, or doesn't poll.
        CorruptTransfer: Its memory is less than announced.
    """

    def __init__(self, handle: IpcHandle, reader: str, deadline: Deadline) -> None:
        self.owner = handle.owner
        self.segments: list[torch.Tensor] = []
        self.buffers: tuple[torch.Tensor, ...] = ()
        self._generation = handle.generation
        self._word: ControlWord | None = None
        self._process = -1
        self._poller = select.poll()
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            with self._typed("open"):
                self._connect(handle.address, deadline)
                self._socket.send(
                    Hello(bytes.fromhex(handle.nonce), handle.generation, reader).pack()
                )
                self._watch()
                while self._word is None or len(self.segments) < len(handle.segments):
                    self._take(handle, deadline)
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """See that the owner lives and that what it exposed may still be read; microseconds.

        Raises:
            PeerDead, Revoked: It doesn't, or may not.
        """
        if self._poller.poll(0):
            raise self._gone("read")
        if self._word is None or not self._word.lit:
            raise self._revoked("read")

    def report(self, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``.

        Raises:
            PeerDead: It is gone.
            Timeout: It has not taken in hundreds of reports.
        """
        with self._typed("notify"):
            try:
                self._socket.send(pack_report(ticket))
            except BlockingIOError:
                raise Timeout(
                    f"Owner {self.owner!r} takes no more reports",
                    backend=BACKEND,
                    where="notify",
                    got="it is stopped, or doesn't poll",
                    cure="look for a stopped trainer",
                ) from None

    def close(self) -> None:
        """Hang up. The memory stays mapped for as long as there are tensors over it."""
        self._socket.close()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        self.segments, self.buffers, self._word = [], (), None

    def _connect(self, address: str, deadline: Deadline) -> None:
        while True:
            try:
                return self._socket.connect(f"\0{address}")
            except BlockingIOError:  # others are waiting to be let in
                self._wait(deadline)

    def _watch(self) -> None:
        """Look at the socket, and at the process: its children may hold copies of the socket."""
        self._poller.register(self._socket, select.POLLRDHUP)
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        if pid > 0:  # else it is in a PID namespace that can't be seen from here
            with suppress(PermissionError):
                try:
                    self._process = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise self._gone("open") from None
                self._poller.register(self._process, select.POLLIN)

    def _take(self, handle: IpcHandle, deadline: Deadline) -> None:
        """Take in a packet of the owner's, if there is one, and map what came with it."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                self._socket, 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return self._wait(deadline)
        try:
            if not packet:
                raise self._gone("open")
            if packet == REVOKED:
                raise self._revoked("open")
            if flags & socket.MSG_CTRUNC:
                raise _too_many_files("fewer than were sent")
            for descriptor in descriptors:
                if self._word is None:
                    self._word = ControlWord(descriptor, handle.slot, handle.word)
                    continue
                nbytes = handle.segments[len(self.segments)]
                self.segments.append(memory.map_shared(descriptor, nbytes, where="open"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _wait(self, deadline: Deadline) -> None:
        if self._process >= 0 and self._poller.poll(0):
            raise self._gone("open")
        deadline.check(
            f"Owner {self.owner!r} has not answered",
            where="open",
            got="no answer: it is stopped, or doesn't poll",
        )
        deadline.wait(_POLL_S)

    @contextmanager
    def _typed(self, where: str) -> Iterator[None]:
        """What sockets say, as our errors."""
        try:
            yield
        except WeightTransferError:
            raise
        except ConnectionError as error:
            raise self._gone(where, error) from None
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise _too_many_files(error) from None
            raise TransportError(
                f"The connection to owner {self.owner!r} failed",
                backend=BACKEND,
                where=where,
                got=error,
                cure="connect again",
            ) from None

    def _gone(self, where: str, got: object = None) -> PeerDead:
        return PeerDead(
            f"Owner {self.owner!r} is gone, has closed, or doesn't know this handle",
            backend=BACKEND,
            where=where,
            got=got,
            cure="look at the trainer's log; connect again",
        )

    def _revoked(self, where: str) -> Revoked:
        return Revoked(
            f"Owner {self.owner!r} doesn't expose this memory any more",
            backend=BACKEND,
            where=where,
            expected=f"generation {self._generation}",
            got="revoked",
            cure="open the owner's new handle",
        )


def _too_many_files(got: object) -> TransportError:
    return TransportError(
        "There are too many open files here",
        backend=BACKEND,
        where="open",
        got=got,
        cure="raise the limit (`ulimit -n`)",
    )
