"""The one place that touches UCX: owns a worker and everything made with it, types its errors.

Nobody else holds an object of UCXX, only numbers, so that :meth:`Fabric.destroy` can end the worker for
certain. UCXX has no call that stops one message; what is under way ends when its peer is closed, and
nothing less. Receives are the worker's, not an endpoint's: those of an endpoint keep the worker alive
for good once the endpoint was closed before they had completed (UCXX 0.52).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from vllm_wt.errors import CorruptTransfer, PeerDead, TransportError, WeightTransferError
from vllm_wt_rdma.nixl import BACKEND
from vllm_wt_rdma.ucx import bindings, memory

_SETTLE_S = 0.02
"""Seconds that UCX gets to end what was given up; it has always taken less than one millisecond."""
_PEER_DEAD = {
    "UCXXConnectionResetError",
    "UCXXEndpointTimeoutError",
    "UCXXNotConnectedError",
    "UCXXUnreachableError",
    "UCXXIOError",
    "UCXXRejectedError",
    "UCXXCanceledError",
    "UCXXShmemSegmentError",
}
_CORRUPT = {"UCXXMessageTruncatedError", "UCXXInvalidAddrError"}


class Fabric:
    """A UCX worker without a thread of its own: what it does, it does in :meth:`drive`.

    Attributes:
        version: UCXX's distribution and version.
        address: What a peer needs to connect to this worker.
        destroyed: Whether :meth:`destroy` was called; every other method fails then.

    Raises:
        BackendUnavailable: UCXX doesn't work here.
    """

    def __init__(self) -> None:
        build = bindings.load()
        self.version = build.version
        self.destroyed = False
        self._api, self._array = build.api, build.array
        self._numbers = itertools.count(1)
        self._peers: dict[int, Any] = {}
        self._requests: dict[int, tuple[Any, object]] = {}
        """Each with what keeps its memory alive: UCX writes to, and reads from, whatever is there."""
        self._loose: set[int] = set()
        """Sends that nobody waits for."""
        with self._typed("start"):
            self._context = build.context()
            self._worker = self._api.UCXWorker(self._context)
            self._any = self._api.UCXXTagMask(0)
            self.address = bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> int:
        """A peer, by its worker's address; the connection itself is made by the first message.

        Raises:
            PeerDead: It is gone, or no network leads to it.
            CorruptTransfer: UCX can't read the address.
        """
        with self._typed("open"):
            found = self._api.UCXAddress.create_from_buffer(bytearray(address))
            peer = self._api.UCXEndpoint.create_from_worker_address(self._worker, found, True)
        number = next(self._numbers)
        self._peers[number] = peer
        return number

    def alive(self, peer: int) -> bool:
        """Whether a peer is there, for all that UCX has been told."""
        with self._typed("connection"):
            return bool(self._peers[peer].alive)

    def close_peer(self, peer: int) -> None:
        """Disconnect at once: what is under way to the peer ends with the next few :meth:`drive`."""
        with suppress(Exception):
            self._peers.pop(peer).close_blocking()

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> int:
        """Begin to send a contiguous tensor's bytes; returns a number for :meth:`done`."""
        return self._send(peer, memory.view(tensor), tag, tensor)

    def say(self, peer: int, data: bytes, tag: int) -> None:
        """Send a few bytes, and don't wait for it; a peer that is gone is no error."""
        with suppress(PeerDead):
            self._loose.add(self._send(peer, data, tag, data))

    def receive(self, tensor: torch.Tensor, tag: int) -> int:
        """Have a message put into a contiguous tensor of its size; returns a number for `done`."""
        return self._receive(memory.view(tensor), tag, tensor)

    def receive_bytes(self, buffer: bytearray, tag: int) -> int:
        """The same into a buffer of this process."""
        return self._receive(buffer, tag, buffer)

    def done(self, number: int) -> bool:
        """Whether a send or receive is complete; raises once if it has failed.

        Raises:
            PeerDead: The peer is gone.
            CorruptTransfer: The message is longer than what it was to be put into.
        """
        if number not in self._requests:  # it ended when its peer was closed
            return True
        request, _kept = self._requests[number]
        with self._typed("transfer"):
            if not request.completed:
                return False
            del self._requests[number]
            request.check_error()
        return True

    def ended(self, numbers: Iterable[int], seconds: float = _SETTLE_S) -> bool:
        """Give UCX a moment to complete sends and receives, in whatever way; forgets those that did.

        Returns:
            Whether all have, and so none touches memory any more.
        """
        left, end = list(numbers), time.monotonic() + seconds
        while left:
            with suppress(WeightTransferError):
                self.drive()
            left = [number for number in left if not self._gone(number)]
            if time.monotonic() > end:
                break
        return not left

    def forget(self, number: int) -> None:
        """Give up a receive that nothing answers any more, into memory that nobody else uses."""
        self._loose.add(number)

    def drive(self) -> bool:
        """One step of UCX; whether anything happened."""
        with self._typed("progress"):
            moved = bool(self._worker.progress_once())
        for number in [number for number in self._loose if self._gone(number)]:
            self._loose.remove(number)
        return moved

    def arrived(self) -> tuple[int, int] | None:
        """Tag and length of the oldest message that nobody has asked for."""
        with self._typed("progress"):
            found = self._worker.tag_probe(self._api.UCXXTag(0), self._any)
            return (found.sender_tag.value, found.length) if found.matched else None

    def drop(self, tag: int) -> None:
        """Get rid of the oldest message of a tag, whatever its length."""
        self._loose.add(self.receive_bytes(bytearray(1), tag))

    def destroy(self) -> None:
        """End the worker and everything of it, never raising and never waiting for a peer: nothing is
        written into memory of ours any more."""
        if not self.destroyed:
            for peer in tuple(self._peers):
                self.close_peer(peer)
            # What had begun to come ends with its peer. What has not, and receives alone are left
            # then, UCX takes off its list when UCXX's object goes.
            self.ended(tuple(self._requests))
            self.destroyed = True
            while self._requests:
                self._requests.popitem()
            with suppress(Exception):
                self._worker.progress()  # UCXX lets go of what has ended
            del self._worker, self._context

    def __del__(self) -> None:
        with suppress(Exception):
            self.destroy()

    def _send(self, peer: int, data: Any, tag: int, kept: object) -> int:
        with self._typed("send"):
            if peer not in self._peers:
                raise PeerDead(
                    "This peer was disconnected",
                    backend=BACKEND,
                    where="send",
                    cure="connect again",
                )
            request = self._peers[peer].tag_send(self._array(data), self._api.UCXXTag(tag))
        return self._keep(request, kept)

    def _receive(self, data: Any, tag: int, kept: object) -> int:
        with self._typed("receive"):
            request = self._worker.tag_recv(self._array(data), self._api.UCXXTag(tag))
        return self._keep(request, kept)

    def _keep(self, request: Any, kept: object) -> int:
        number = next(self._numbers)
        self._requests[number] = (request, kept)
        return number

    def _gone(self, number: int) -> bool:
        try:
            return self.done(number)
        except WeightTransferError:
            return number not in self._requests

    def _typed(self, where: str) -> _Typed:
        if self.destroyed:
            raise TransportError(
                "This endpoint was closed or given up",
                backend=BACKEND,
                where=where,
                cure="make a new transport",
            )
        return _Typed(where)


class _Typed:
    """Turns UCXX's exceptions into ours, without the tracebacks that would keep its objects."""

    def __init__(self, where: str) -> None:
        self._where = where

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
            typed = _typed_error(error, self._where)
            raise typed from error.with_traceback(None)


def _typed_error(error: Exception, where: str) -> WeightTransferError:
    name = type(error).__name__
    cls: type[WeightTransferError] = TransportError
    what, cure = "UCX failed", "connect again; UCX_LOG_LEVEL=info tells more"
    if name in _PEER_DEAD:
        cls, what = PeerDead, "The peer is gone, or can't be reached"
        cure = "look at the peer's log; check UCX_TLS and UCX_NET_DEVICES; connect again"
    elif name in _CORRUPT:
        cls, what = CorruptTransfer, "UCX can't make sense of what the peer has sent"
        cure = "install the same UCXX release on both sides"
    return cls(what, backend=BACKEND, where=where, got=f"{name} {error}".strip(), cure=cure)
