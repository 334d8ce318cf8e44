"""The owner and the readers of ``vllm-wt bench fleet``, and rounds with all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Self

from vllm_wt.cli.bench_owner import SIDES
from vllm_wt.clients.relay import RelayClient
from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead

_START_S = 120.0
_CALL_S = 180.0
_LOOK_S = 0.05
_REPORT_S = 10.0
"""Seconds for the readers' reports to reach the owner."""


@dataclass(frozen=True)
class Span:
    """When a reader began and ended, by the host's clock."""

    began: float
    ended: float


class Member:
    """A process, and calls to it.

    Args:
        module: What it runs.
        config: Its argument.
    """

    def __init__(self, module: str, config: dict[str, Any]) -> None:
        self._socket = Path(config["socket"])
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"vllm_wt.cli.{module}", json.dumps(config)],
            stdout=subprocess.DEVNULL,  # UCX logs there
        )
        self._client: RelayClient | None = None

    def call(self, method: str, *args: Any) -> Any:
        if self._client is None:
            self._client = self._connected()
        return self._client.call(method, *args)

    def was_killed(self) -> bool:
        """Whether it has ended, by SIGKILL."""
        try:
            return self._process.wait(_REPORT_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def end(self) -> None:
        if self._client is not None:
            self._client.close()
        self._process.kill()
        self._process.wait()

    def _connected(self) -> RelayClient:
        deadline = Deadline(_START_S)
        while True:
            try:
                return RelayClient(self._socket, timeout_s=_CALL_S)
            except PeerDead:
                if self._process.poll() is not None or deadline.expired:
                    raise
                deadline.wait(_LOOK_S)


class Fleet:
    """One owner and its readers, all connected by `start`; they end with the context.

    Args:
        folder: For sockets.
        backend: A Transport with a baseline.
        readers: How many.
        nbytes: Of the weights.
        tensors: How many they are.
    """

    def __init__(
        self, folder: Path, *, backend: str, readers: int, nbytes: int, tensors: int
    ) -> None:
        self._folder = folder
        self._backend = backend
        self._size = readers
        self._weights = {"transport": "", "nbytes": nbytes, "tensors": tensors}
        self._version = 0
        self._members: list[Member] = []
        self._pool = ThreadPoolExecutor(readers + 1, "vllm-wt-fleet")
        self.readers: list[Member] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self._members:
            member.end()
        self._pool.shutdown()

    def start(self) -> None:
        self._owner = self._member("bench_fleet_owner", self._weights)
        self.readers = [self._reader(rank) for rank in range(self._size)]
        self._raw: str = self._owner.call("expose_raw")
        for reader in self.readers:
            self._connect(reader)

    def round(self, side: str, readers: Sequence[Member]) -> list[Span | None]:
        """All of these read a new publish; None for one that has died of it."""
        self._version += 1
        info = self._owner.call("publish", side, self._version)
        spans = self._at_once(readers, "receive", side, info)
        self._owner.call("sent")
        return spans

    def raw(self) -> list[Span | None]:
        """All of them read the same bytes without us."""
        return self._at_once(self.readers, "read_raw")

    def is_right(self, readers: Sequence[Member]) -> bool:
        """Whether these have what the owner has, and it knows of them and of no others."""
        wanted, *found = self._pool.map(
            lambda member: member.call("content"), [self._owner, *readers]
        )
        deadline = Deadline(_REPORT_S)
        while self._owner.call("delivered") < len(readers) and not deadline.expired:
            deadline.wait(_LOOK_S)
        return set(found) == {wanted} and self._owner.call("delivered") == len(readers)

    def replace(self, reader: Member) -> None:
        """Another one for one that has died."""
        rank = self.readers.index(reader)
        self.readers[rank] = self._reader(rank)
        self._connect(self.readers[rank])

    def _member(self, module: str, config: dict[str, Any]) -> Member:
        path = self._folder / f"{len(self._members)}.sock"
        common = {"socket": str(path), "backend": self._backend, "device": "cpu"}
        member = Member(module, common | config)
        self._members.append(member)
        return member

    def _reader(self, rank: int) -> Member:
        return self._member("bench_fleet_reader", {"rank": rank, "size": self._size})

    def _connect(self, reader: Member) -> None:
        for side in SIDES:
            reader.call("connect", side, self._owner.call("describe", side))
        reader.call("connect_raw", self._raw)

    def _at_once(self, readers: Sequence[Member], method: str, *args: Any) -> list[Span | None]:
        return list(self._pool.map(partial(_span, method=method, args=args), readers))


def _span(reader: Member, method: str, args: Sequence[Any]) -> Span | None:
    try:
        began, ended = reader.call(method, *args)
    except PeerDead:
        if reader.was_killed():
            return None
        raise
    return Span(began, ended)
