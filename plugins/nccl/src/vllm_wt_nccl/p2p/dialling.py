"""How a reader gets through to an owner."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence

from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead
from vllm_wt_nccl.p2p import BACKEND

_LOOK_S = 0.02
"""Seconds between two looks at a deadline, which another thread may cancel."""


def dialled(owner: str, ways: Sequence[tuple[str, int]], deadline: Deadline) -> socket.socket:
    """A connection by the first way that leads there.

    Args:
        owner: Its name, for errors.
        ways: Addresses and ports.
        deadline: For each attempt, and all of them.

    Raises:
        PeerDead: None does.
        Timeout, Aborted: The deadline has passed, or was cancelled.
    """
    failures: list[str] = []
    for address, port in ways:
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            failure = _connect(made, address, port, owner, deadline)
        except BaseException:
            made.close()
            raise
        if failure == 0:
            return made
        made.close()
        failures.append(f"{address}, port {port}: {os.strerror(failure)}")
    raise PeerDead(
        f"Owner {owner!r} is not reached",
        backend=BACKEND,
        where="open",
        expected="a connection to the process that exposed the memory",
        got="; ".join(failures) or "it listens on the loopback of another host alone",
        cure="see whether it runs, and whether its host is reached from this one; connect again",
    )


def _connect(made: socket.socket, address: str, port: int, owner: str, deadline: Deadline) -> int:
    made.setblocking(False)
    failure = made.connect_ex((address, port))
    if failure != errno.EINPROGRESS:
        return failure
    ready = select.poll()
    ready.register(made, select.POLLOUT)
    while not ready.poll(1000 * min(_LOOK_S, deadline.remaining())):
        deadline.check(
            f"Owner {owner!r} is not reached in time",
            where="open",
            got=f"no answer from {address}, port {port}",
        )
    return int(made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
