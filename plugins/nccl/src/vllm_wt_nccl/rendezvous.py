"""Where a trainer and its workers meet: a TCPStore of the trainer's own, every call bounded.

The store's own calls wait without end for a server that is stopped, so they are made on a thread that
can be left to itself. It is apart from whatever ``torch.distributed`` the trainer has set up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from vllm_wt.caller import Caller, has_ended
from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, TransportError, WeightTransferError

_LOOK_S = 0.05
"""Seconds between two looks at a deadline, which another thread may cancel."""
_FIRST_S, _MOST_S = 0.0002, 0.005
"""Seconds between two questions for a key, which grow. (The store could be asked to wait; it writes a
page to the log whenever that takes longer than it was told to.)"""
_SILENT = "The trainer's rendezvous does not answer"
_FIRST_TRY_S = 1.0
"""Seconds that the first try to connect may take, the next one twice that, and so on."""
_AGAIN_S = 0.05
"""Seconds between two tries."""
_LEAST_S = 0.01
"""Least seconds to connect in: torch takes 0 for no limit."""


class Rendezvous:
    """One side's connection to the store; its keys are the session's own.

    Args:
        store: Connected.
        session: Name of the trainer's session.
        address: By which the trainer is reached.
        port: Likewise.
    """

    def __init__(self, store: Store, session: str, address: str, port: int) -> None:
        self._store: Any = PrefixStore(session, store)  # torch does not declare all of it
        self._session = session
        self.address = address
        self.port = port
        self._caller = Caller("vllm-wt-rendezvous")

    @classmethod
    def host(cls, session: str, address: str, port: int, deadline: Deadline) -> Rendezvous:
        """The trainer's side, which keeps the store.

        Args:
            session: Of the trainer.
            address: Of this host, as workers reach it; it listens there alone.
            port: Likewise; 0 for any that is free.
            deadline: For setting it up.

        Raises:
            InvalidInfo: The address is none of this host, or stands for all of them; or the port is
                taken.
        """
        listening = _listen(address, port)
        port = int(listening.getsockname()[1])
        # The store takes the socket over, and closes it.
        store = bounded(
            Caller("vllm-wt-rendezvous"),
            lambda: _store(address, port, deadline.remaining(), listening.detach()),
            deadline,
            _SILENT,
            where=f"{address}, port {port}",
        )
        rendezvous = cls(store, session, address, port)
        rendezvous.put("session", session, deadline)
        return rendezvous

    @classmethod
    def join(cls, session: str, address: str, port: int, deadline: Deadline) -> Rendezvous:
        """A worker's side.

        Raises:
            PeerDead: Nothing listens there, or something else than this session's trainer.
            Timeout, Aborted: Nobody answers in time, or the deadline was cancelled.
        """
        where = f"{address}, port {port}"
        store = _joined(address, port, deadline)
        rendezvous = cls(store, session, address, port)
        if not rendezvous.has("session", deadline):
            raise PeerDead(
                "Another trainer answers at the rendezvous of this one, which must have ended",
                where=where,
                expected=f"session {session}",
                got="another session",
                cure="connect again with the trainer that runs; give each a port of its own, or none",
            )
        return rendezvous

    def apart(self, name: str, deadline: Deadline) -> Store:
        """A store for a process group to set itself up by, through a connection of its own: a call that
        waits for a key keeps all other calls of its connection waiting.

        Args:
            name: Of the group; its keys are its own.
            deadline: For connecting; as of `get` what is raised.
        """
        store = _joined(self.address, self.port, deadline)
        return PrefixStore(f"{self._session}/{name}", store)

    def put(self, key: str, value: str, deadline: Deadline) -> None:
        """Leave something under a key; as of `get` what is raised."""
        self._call(lambda: self._store.set(key, value), deadline)

    def has(self, key: str, deadline: Deadline) -> bool:
        """Whether something is under a key; as of `get` what is raised."""
        return bool(self._call(lambda: self._store.check([key]), deadline))

    def add(self, key: str, amount: int, deadline: Deadline) -> int:
        """Raise a number and return it; 0 at first. As of `get` what is raised."""
        return int(self._call(lambda: self._store.add(key, amount), deadline))

    def append(self, key: str, value: str, deadline: Deadline) -> None:
        """Leave something behind what is under a key; as of `get` what is raised."""
        self._call(lambda: self._store.append(key, value), deadline)

    def offer(self, key: str, value: str, deadline: Deadline) -> None:
        """Leave something under a key unless something is there; as of `get` what is raised."""
        self._call(lambda: self._store.compare_set(key, "", value), deadline)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Forget a key; as of `get` what is raised."""
        self._call(lambda: self._store.delete_key(key), deadline)

    def get(
        self, key: str, deadline: Deadline, what: str, watch: Callable[[], None] | None = None
    ) -> bytes:
        """What is under a key, once something is.

        Args:
            key: Which.
            deadline: For all of it.
            what: It in words, for the error.
            watch: Called now and then; raises when it will not come.

        Raises:
            PeerDead: The trainer has gone.
            Timeout, Aborted: It does not answer in time, or the deadline was cancelled.
        """
        self._until(lambda: self.has(key, deadline), deadline, what, watch, lambda: None)
        return bytes(self._call(lambda: self._store.get(key), deadline))

    def reached(
        self,
        key: str,
        least: int,
        deadline: Deadline,
        what: str,
        watch: Callable[[], None] | None = None,
        got: Callable[[int], str] | None = None,
    ) -> int:
        """A number, once it is at least ``least``; as of `get` what is raised.

        Args:
            key: Which number.
            least: What to wait for.
            deadline: For all of it.
            what: It in words, for the error.
            watch: Called now and then; raises when it will not come.
            got: What the number says so far, for the error.
        """
        count = 0

        def has_reached() -> bool:
            nonlocal count
            count = self.add(key, 0, deadline)
            return count >= least

        self._until(has_reached, deadline, what, watch, lambda: got(count) if got else None)
        return count

    def _until(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        what: str,
        watch: Callable[[], None] | None,
        got: Callable[[], str | None],
    ) -> None:
        seconds = _FIRST_S
        while True:
            try:
                if ready():
                    return
                if watch is not None:
                    watch()
                deadline.wait(seconds)
            except Timeout:
                # Whichever question the deadline has met, it is the answer that did not come.
                deadline.check(what, where=self._where, got=got())
                raise
            deadline.check(what, where=self._where, got=got())
            seconds = min(2 * seconds, _MOST_S)

    def close(self) -> None:
        """Let go of the store, and of the port where it is kept here; no other call works then."""
        self._store = None

    @property
    def _where(self) -> str:
        return f"{self.address}, port {self.port}"

    def _call(self, function: Callable[[], Any], deadline: Deadline) -> Any:
        deadline.check(_SILENT, where=self._where)
        return bounded(self._caller, function, deadline, _SILENT, where=self._where)


def local_address(peer: str) -> str:
    """The address of this host from which a peer is reached; nothing is sent.

    Raises:
        TransportError: No way leads there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            _bare(peer), 1, type=socket.SOCK_DGRAM, flags=socket.AI_ADDRCONFIG
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(
            f"No way leads from this host to {peer!r}: {error}",
            where="rendezvous",
            expected="a name or an address that is reached from here",
            got=peer,
            cure="give the trainer's address by WeightSync.connect(..., address=...)",
        ) from error


def _bare(address: str) -> str:
    """An IPv6 address may come in brackets, as in URLs."""
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def _listen(address: str, port: int) -> socket.socket:
    bare = _bare(address)
    if bare in {"0.0.0.0", "::"}:
        raise InvalidInfo(
            "This address stands for all of this host's, and workers cannot connect to it",
            where="address",
            expected="one address of this host",
            got=address,
            cure="give the one that the engines' hosts reach",
        )
    try:
        family, kind, proto, _, target = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        try:
            # A trainer that has just ended keeps nobody from its port; one that listens there does.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(target)
            listening.listen()
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise InvalidInfo(
            f"The trainer cannot be met at this address: {error}",
            where="address, port",
            expected="an address of this host, and a port that is free there",
            got=f"{address}, port {port}",
            cure="leave the port out for any that is free; give another address, or none",
        ) from error
    return listening


def _require_listening(address: str, port: int, deadline: Deadline) -> None:
    seconds = max(_LEAST_S, deadline.remaining())
    try:
        socket.create_connection((_bare(address), port), seconds).close()
    except TimeoutError:
        return  # as the store will find, too
    except OSError as error:
        raise PeerDead(
            f"The trainer is not reached: {error}",
            where=f"{address}, port {port}",
            expected="its rendezvous",
            got="no connection",
            cure="see whether the trainer runs; where this host reaches it by another address, give "
            "that by WeightSync.connect(..., address=...)",
        ) from error


def _joined(address: str, port: int, deadline: Deadline) -> TCPStore:
    """A connection of a worker's to the store.

    Left to itself, torch would try until the deadline to reach a store that has ended, and wait as long
    for an answer that got lost.

    Raises:
        PeerDead: Nothing listens there, or not any more.
        Timeout, Aborted: Nobody answers in time, or the deadline was cancelled.
    """
    where = f"{address}, port {port}"
    caller = Caller("vllm-wt-rendezvous")
    seconds = _FIRST_TRY_S
    while True:
        listens = partial(_require_listening, address, port, deadline)
        bounded(caller, listens, deadline, _SILENT, where=where)
        connect = partial(_store, address, port, min(seconds, deadline.remaining()))
        try:
            store: TCPStore = bounded(caller, connect, deadline, _SILENT, where=where)
        except PeerDead:
            seconds *= 2
            deadline.wait(_AGAIN_S)
            continue
        store.set_timeout(timedelta(seconds=max(_LEAST_S, deadline.remaining())))
        return store


def _store(address: str, port: int, seconds: float, listening: int | None = None) -> TCPStore:
    return TCPStore(
        _bare(address),
        port,
        is_master=listening is not None,
        timeout=timedelta(seconds=max(_LEAST_S, seconds)),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def bounded(
    caller: Caller, function: Callable[[], Any], deadline: Deadline, what: str, *, where: str
) -> Any:
    """The result of a function of torch's, or a typed error in time; it may go on without anybody.

    Args:
        caller: Has a thread for it.
        function: Which.
        deadline: For it.
        what: Is said when it has not returned by then.
        where: Likewise.

    Raises:
        PeerDead: It has failed by an error of torch's stores and networks.
        Timeout, Aborted: The deadline has passed, or was cancelled.
        Exception: What else it raises.
    """
    return awaited(caller(function), deadline, what, where=where)


def awaited(
    future: Future[Any],
    deadline: Deadline,
    what: str,
    *,
    where: str,
    watch: Callable[[], None] | None = None,
) -> Any:
    """The same of a function that was called; ``watch`` is called now and then, and may raise."""
    while not has_ended(future, min(_LOOK_S, deadline.remaining())):
        deadline.check(what, where=where)
        if watch is not None:
            try:
                watch()
            except Timeout:
                deadline.check(what, where=where)
                raise
    try:
        return future.result()
    except RuntimeError as error:
        if isinstance(error, WeightTransferError):
            raise
        deadline.check(what, where=where)
        raise PeerDead(
            f"The trainer's rendezvous is not there any more: {error}",
            where=where,
            cure="see whether the trainer runs, and whether its address is reached from this host",
        ) from error
