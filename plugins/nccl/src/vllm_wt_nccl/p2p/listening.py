"""Where an owner can be connected to."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from vllm_wt.errors import TransportError, WeightTransferError
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.channel import not_inherited
from vllm_wt_nccl.rendezvous import local_address

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, 3849): the way to them is the way to most others."""
_WAITING = 1024
_MOST_ACCEPTED = 64
"""At a time."""


class Listener:
    """Listens on the loopback, and on the address by which other hosts reach this one.

    Attributes:
        ways: Addresses and ports, the loopback's first.

    Raises:
        TransportError: No socket can be made.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        failure: OSError | None = None
        for address in _addresses():
            try:
                self._sockets.append(_listening(address))
            except OSError as error:
                failure = error
        if not self._sockets:
            raise TransportError(
                f"Nobody can be listened for: {failure}",
                backend=BACKEND,
                where="expose",
                cure="raise the limit of open files (`ulimit -n`); see that the loopback is up",
            )
        self.ways = tuple(
            (str(name[0]), int(name[1])) for name in (each.getsockname() for each in self._sockets)
        )

    def accepted(self) -> list[socket.socket]:
        """Who has connected."""
        found: list[socket.socket] = []
        for each in self._sockets:
            with suppress(OSError):  # nobody is waiting
                for _ in range(_MOST_ACCEPTED):
                    found.append(each.accept()[0])
        return found

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _addresses() -> list[str]:
    found = ["127.0.0.1"]
    for elsewhere in _ELSEWHERE:
        with suppress(WeightTransferError):
            address = local_address(elsewhere)
            if not ipaddress.ip_address(address).is_loopback:
                return [*found, address]
    return found


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setblocking(False)
        made.bind((address, 0))
        made.listen(_WAITING)
    except OSError:
        made.close()
        raise
    not_inherited(made)
    return made
