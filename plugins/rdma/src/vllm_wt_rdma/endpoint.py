"""The one place that touches a NIXL agent: owns it and everything made with it, types its errors.

Nobody else holds a NIXL object, only numbers, so that :meth:`Endpoint.destroy` can end the agent
for certain. That matters because it is the only way to stop a read: releasing the handle of a read
that is under way, and even removing the peer, let it write on (seen over TCP with NIXL 1.5.1: a
released 64 MiB read overwrote its target afterwards).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from vllm_wt.errors import (
    BackendUnavailable,
    CorruptTransfer,
    PeerDead,
    Revoked,
    TransportError,
    WeightTransferError,
)
from vllm_wt_rdma import nixl
from vllm_wt_rdma.nixl import BACKEND

Row = tuple[int, int, int]
"""Address, length in bytes, device number."""

_SEE_LOG = "see what UCX and NIXL logged; UCX_LOG_LEVEL=info tells more"
_ERRORS: dict[tuple[str, str | None], tuple[type[WeightTransferError], str, str]] = {
    ("nixlRemoteDisconnectError", None): (
        PeerDead,
        "The peer is gone, or has freed the memory that was read",
        "look at the peer's log; connect again",
    ),
    ("nixlBackendError", "open"): (
        PeerDead,
        "The peer can't be connected to: it is gone, or no network leads to it",
        f"look at the peer's log; check UCX_TLS and UCX_NET_DEVICES; {_SEE_LOG}",
    ),
    ("nixlBackendError", None): (TransportError, "NIXL's UCX backend refused", _SEE_LOG),
    ("nixlNotFoundError", None): (
        Revoked,
        "NIXL doesn't know this peer or this memory any more",
        "connect again",
    ),
    ("nixlMismatchError", None): (
        CorruptTransfer,
        "NIXL cannot read the peer's metadata",
        "install the same NIXL release on both sides",
    ),
}
"""By name, since the builds for CUDA 12 and 13 have classes of their own, and by where it was."""
_OTHER = (TransportError, "NIXL failed", f"connect again; {_SEE_LOG}")

_SETTLE_POLLS = 16
"""Rounds of UCX's progress before an agent is destroyed; each runs until nothing more happens."""


class Endpoint:
    """A NIXL agent with the UCX backend and no progress thread.

    The progress thread would spin on a core for as long as the agent lives.

    Args:
        name: Name of the agent.

    Attributes:
        version: NIXL's distribution and version.
        destroyed: Whether :meth:`destroy` was called; every other method fails then.

    Raises:
        BackendUnavailable: NIXL or its UCX backend doesn't work here.
    """

    def __init__(self, name: str) -> None:
        build = nixl.load()
        self.version = build.version
        self._ids = itertools.count(1)
        self._registered: dict[int, Any] = {}
        # NIXL writes to whatever is there: memory must outlive the reads, so it is held until the
        # agent is gone.
        self._memory: dict[int, Sequence[torch.Tensor]] = {}
        self._reads: dict[int, Any] = {}
        self._peers: set[str] = set()
        self._agent: Any = None
        self.destroyed = False
        with self._typed("start", name):
            self._agent = build.module.nixl_agent(
                name, build.module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            self._ended = weakref.ref(self._agent.agent)  # the object that owns the C++ agent
        if "UCX" not in self._agent.backends:
            raise BackendUnavailable(
                f"{self.version} has no UCX backend",
                backend=BACKEND,
                got=", ".join(self._agent.get_plugin_list()),
                cure="reinstall it; unset NIXL_PLUGIN_DIR",
            )

    def register(self, kind: str, rows: Sequence[Row], memory: Sequence[torch.Tensor]) -> int:
        """Register memory in one call; returns its number.

        Args:
            kind: ``"DRAM"`` or ``"VRAM"``.
            rows: Where it lies.
            memory: What keeps it alive; held until it is deregistered or the agent is gone.
        """
        # The same row twice in one call crashes the process when it is deregistered.
        unique = [(*row, "") for row in dict.fromkeys(rows)]
        number = next(self._ids)
        with self._typed("register", f"{len(unique)} buffers of {kind}"):
            self._registered[number] = self._agent.register_memory(unique, kind)
        self._memory[number] = memory
        return number

    def deregister(self, number: int) -> None:
        with self._typed("unregister"):
            self._agent.deregister_memory(self._registered.pop(number))
        del self._memory[number]

    def metadata(self) -> bytes:
        """What a peer needs to reach everything that is registered now."""
        with self._typed("expose"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, name: str, metadata: bytes, version: str) -> None:
        """Make a peer known. The connection itself is made by the first read.

        Raises:
            CorruptTransfer: The metadata is not that of ``name``, or NIXL can't read it.
        """
        with self._typed("open", f"peer {name!r} with {version}, here {self.version}"):
            found = self._agent.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else str(found)
        self._peers.add(found)
        if found != name:
            self.remove_peer(found)
            raise CorruptTransfer(
                "NIXL's metadata belongs to another owner than the handle says",
                backend=BACKEND,
                where="open",
                expected=name,
                got=found,
                cure="connect again",
            )
        with self._typed("open", f"peer {name!r}"):
            self._agent.make_connection(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect; a peer that isn't known any more (NIXL drops dead ones) is no error."""
        if name in self._peers:
            self._peers.remove(name)
            with suppress(Exception):
                self._agent.remove_remote_agent(name)

    def make_read(
        self, peer: str, local: tuple[str, Sequence[Row]], remote: tuple[str, Sequence[Row]]
    ) -> int:
        """Prepare a read that can be posted again and again; returns its number.

        Args:
            peer: Whose memory is read.
            local: Memory kind and rows to write to.
            remote: Memory kind and rows to read from, of the same lengths.
        """
        number = next(self._ids)
        with self._typed("prepare", f"peer {peer!r}"):
            self._reads[number] = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(list(local[1]), local[0]),
                self._agent.get_xfer_descs(list(remote[1]), remote[0]),
                peer,
                backends=["UCX"],
            )
        return number

    def post(self, read: int) -> bool:
        """Start a read; whether it is complete already. Within a host UCX copies in this call."""
        with self._typed("read"):
            return self._done(self._agent.transfer(self._reads[read]))

    def check(self, read: int) -> bool:
        """Drive the fabric; whether a read is complete."""
        with self._typed("read"):
            return self._done(self._agent.check_xfer_state(self._reads[read]))

    def release(self, read: int) -> None:
        """Forget a read that is complete or was never posted."""
        with self._typed("release"):
            self._reads.pop(read).release()

    def send(self, peer: str, message: bytes) -> None:
        """Send a notification; it leaves once the fabric is driven, at the latest."""
        with self._typed("notify", f"peer {peer!r}"):
            self._agent.send_notif(peer, message)

    def receive(self) -> dict[str, list[bytes]]:
        """Drive the fabric once; notifications that have come, by sender."""
        with self._typed("progress"):
            found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return found

    def destroy(self) -> bool:
        """End the agent and every read of it, never raising and never waiting for a peer.

        Returns:
            Whether it is gone, and so nothing writes into registered memory any more. It is not
            while an exception that interrupted a NIXL call is being handled; call again later.
        """
        self._settle()
        while self._reads:
            with suppress(Exception):
                self._reads.popitem()[1].release()
        while self._peers:
            self.remove_peer(next(iter(self._peers)))
        self._settle()
        while self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(self._registered.popitem()[1])
        self._agent = None
        self.destroyed = True
        gone = self._ended() is None
        if gone:
            self._memory.clear()
        return gone

    def _settle(self) -> None:
        """Let UCX end what failed: it aborts the process when a dead peer's reads are still queued.

        (UCX 1.23, ``ucs_arbiter_group_is_empty`` in ``uct_cma_ep_t_delete``.)
        """
        for _ in range(_SETTLE_POLLS):
            with suppress(Exception):
                self._agent.get_new_notifs()

    def __del__(self) -> None:
        with suppress(Exception):
            self.destroy()

    def _done(self, state: str) -> bool:
        if state not in {"DONE", "PROC"}:
            raise TransportError(
                "A read failed",
                backend=BACKEND,
                where="read",
                got=state,
                cure="push again, which connects anew",
            )
        return state == "DONE"

    def _typed(self, where: str, got: str | None = None) -> _Typed:
        if self.destroyed:
            raise TransportError(
                "This endpoint was closed or given up",
                backend=BACKEND,
                where=where,
                cure="make a new transport",
            )
        return _Typed(where, got)


class _Typed:
    """Turns NIXL's exceptions into ours.

    They lose their tracebacks on the way: the frames in them, which ours would carry along, keep
    the agent alive after :meth:`Endpoint.destroy`. ``contextlib.contextmanager`` would keep them.
    """

    def __init__(self, where: str, got: str | None) -> None:
        self._where = where
        self._got = got

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del traceback
        if isinstance(error, Exception) and not isinstance(error, WeightTransferError):
            typed = _typed_error(error, self._where, self._got)
            raise typed from error.with_traceback(None)


def _typed_error(error: Exception, where: str, got: str | None) -> WeightTransferError:
    text = f"{type(error).__name__} {error}".strip()
    cls, what, cure = _ERRORS.get((type(error).__name__, where)) or _ERRORS.get(
        (type(error).__name__, None), _OTHER
    )
    return cls(
        what, backend=BACKEND, where=where, got=f"{text} ({got})" if got else text, cure=cure
    )
