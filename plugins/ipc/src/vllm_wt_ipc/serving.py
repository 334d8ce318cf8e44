"""The owner's end of the readers' connections, driven by ``progress`` alone."""

from __future__ import annotations

import errno
import hmac
import math
import select
import socket
import time
from contextlib import suppress

from vllm_wt_ipc.exposures import Exposures
from vllm_wt_ipc.messages import (
    GRANTED,
    MOST_BYTES,
    MOST_DESCRIPTORS,
    REVOKED,
    unpack_hello,
    unpack_report,
)
from vllm_wt_ipc.tickets import Tickets

_MOST_STRANGERS = 64
"""Connections that have not said who is there; of more, the oldest are closed."""
_SILENT_S = 10.0
"""Seconds that they have to do so."""
_MOST_PACKETS = 64
"""Taken in from one reader before the next one's turn."""
_TRY_LATER = {errno.EAGAIN, errno.ETOOMANYREFS}


class _Guest:
    """A connection; a stranger until it has said hello.

    Attributes:
        reader: Its name; empty for a stranger.
        generation: What it wants to read.
        wanting: Whether it is still to be answered.
        sent: Descriptors that it has been sent.
        since: When it came.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = ""
        self.generation = 0
        self.wanting = False
        self.sent = 0
        self.since = time.monotonic()


class Server:
    """Lets readers in, tells them what they may read, and takes in their reports.

    Whoever says anything else is dropped at once, and so is who says nothing for a while.

    Args:
        exposures: What may be read.
        tickets: Where reports go.
    """

    def __init__(self, exposures: Exposures, tickets: Tickets) -> None:
        self._exposures = exposures
        self._tickets = tickets
        self._listener: socket.socket | None = None
        self._guests: list[_Guest] = []

    def start(self) -> None:
        """Listen, if it doesn't yet."""
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                listener.bind(f"\0{self._exposures.address}")
                listener.listen(2 * _MOST_STRANGERS)
            except BaseException:
                listener.close()
                raise
            self._listener = listener

    def progress(self) -> None:
        """Take in who has come and what was said, and answer; never waits."""
        if self._listener is None:
            return
        with suppress(OSError):  # nobody is waiting, or there are too many open files for now
            for _ in range(_MOST_STRANGERS):
                connection, _address = self._listener.accept()
                connection.setblocking(False)
                self._guests.append(_Guest(connection))
        for guest in self._guests:
            if not self._drive(guest):
                guest.connection.close()
        self._guests = [guest for guest in self._guests if guest.connection.fileno() >= 0]
        self._drop_strangers()

    def listen(self, seconds: float) -> None:
        """Wait until there is something to take in, for so long at most."""
        if self._listener is None:
            time.sleep(seconds)
            return
        poll = select.poll()
        for each in (self._listener, *(guest.connection for guest in self._guests)):
            poll.register(each, select.POLLIN)
        poll.poll(math.ceil(seconds * 1e3))

    def close(self) -> None:
        """Hang up. Processes that were forked may hold copies of the sockets: they are shut down."""
        sockets = [guest.connection for guest in self._guests]
        if self._listener is not None:
            sockets.append(self._listener)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._listener, self._guests = None, []

    def _drive(self, guest: _Guest) -> bool:
        """Whether a connection is to be kept."""
        try:
            for _ in range(_MOST_PACKETS):
                packet = guest.connection.recv(MOST_BYTES + 1)
                if not packet or not self._take(guest, packet):
                    return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        if guest.wanting:
            try:
                self._answer(guest)
            except OSError as error:
                return error.errno in _TRY_LATER
        return True

    def _take(self, guest: _Guest, packet: bytes) -> bool:
        if guest.reader:
            ticket = unpack_report(packet)
            if ticket is None:
                return False
            self._tickets.add(guest.reader, ticket)
            return True
        hello = unpack_hello(packet)
        if hello is None or not hmac.compare_digest(hello.nonce, self._exposures.nonce):
            return False
        guest.reader, guest.generation, guest.wanting = hello.reader, hello.generation, True
        return True

    def _answer(self, guest: _Guest) -> None:
        exposure = self._exposures.get(guest.generation)
        if exposure is None:
            guest.connection.send(REVOKED)
            guest.wanting = False
            return
        while guest.sent < len(exposure.descriptors):
            some = exposure.descriptors[guest.sent : guest.sent + MOST_DESCRIPTORS]
            socket.send_fds(guest.connection, [GRANTED], some)
            guest.sent += len(some)
        guest.wanting = False

    def _drop_strangers(self) -> None:
        strangers = [guest for guest in self._guests if not guest.reader]
        now = time.monotonic()
        for index, guest in enumerate(strangers):
            if index < len(strangers) - _MOST_STRANGERS or now - guest.since > _SILENT_S:
                guest.connection.close()
                self._guests.remove(guest)
