"""By which an engine's workers see that their trainer lives, when another one wants them."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from vllm_wt.deadline import Deadline
from vllm_wt.info import TrainerInfo

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
"""Seconds in which a trainer that lives has answered; the kernel takes connections for one that is
stopped, too."""
_LEAST_S = 0.001
"""Least seconds: 0 is no limit."""
_PROBE_PORT = 9
"""Of nobody: nothing is sent there."""


class Beacon:
    """Answers whoever connects with a digest of the session's name, for as long as the process runs.
    Not with the name itself, by which a stranger could pass for one of its workers."""

    def __init__(self) -> None:
        self._listening: dict[str, socket.socket] = {}
        self._lock = threading.Lock()  # engines are connected side by side
        self._stop = weakref.finalize(self, _close, self._listening)

    def towards(self, session: str, host: str | None) -> TrainerInfo:
        """What the workers of an engine are to know of this trainer.

        Args:
            session: Its name; the same in all calls.
            host: Where the engine is; None for this host.
        """
        address = "127.0.0.1" if host is None else _own_address(host)
        return TrainerInfo(
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            born=_born(),
            beacon="" if address is None else self._listen(session, address),
        )

    def close(self) -> None:
        """Answer no more; idempotent."""
        self._stop()

    def _listen(self, session: str, address: str) -> str:
        with self._lock:
            listening = self._listening.get(address)
            if listening is None:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                try:
                    listening = socket.create_server((address, 0), family=family)
                except OSError as error:
                    logger.warning("vllm-wt: no port for engines to see that we live: %s", error)
                    return ""
                self._listening[address] = listening
                threading.Thread(
                    target=_answer,
                    args=(listening, _answer_of(session)),
                    name="vllm-wt-beacon",
                    daemon=True,
                ).start()
            port = listening.getsockname()[1]
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def lives(trainer: TrainerInfo, session: str) -> bool:
    """Whether a trainer still answers for a session. One that is stopped, or cannot be reached from
    here, does not.

    Args:
        trainer: What it has told of itself.
        session: Its name for what it does with this engine.
    """
    host, _, port = trainer.beacon.rpartition(":")
    if not host:
        return False
    expected = _answer_of(session)
    deadline = Deadline(_ANSWER_S)
    got = b""
    with (
        suppress(OSError, ValueError, OverflowError),  # what was told may be no port
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as connection,
    ):
        while len(got) < len(expected):
            connection.settimeout(max(_LEAST_S, deadline.remaining()))
            if not (more := connection.recv(len(expected))):
                break
            got += more
    return got == expected


def _answer_of(session: str) -> bytes:
    return hashlib.sha256(session.encode()).digest()


def _answer(listening: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed
            return
        with connection, suppress(OSError):
            connection.setblocking(False)  # it fits into the socket's buffer
            connection.send(answer)


def _close(listening: dict[str, socket.socket]) -> None:
    for each in listening.values():
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # wakes its thread
        each.close()
    listening.clear()


def _own_address(host: str) -> str | None:
    """The address of this host from which another is reached; None if it is not."""
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(
            host, _PROBE_PORT, type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def _born() -> int:
    """When this process has begun, in clock ticks: a later one may have its number."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])
