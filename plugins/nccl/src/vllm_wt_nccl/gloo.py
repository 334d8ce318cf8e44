"""Broadcasts between host memory, by a gloo process group apart from ``torch.distributed``'s own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt.errors import PeerDead, Timeout, TransportError, WeightTransferError

_THREADS = 4
"""Of the group: as many operations are on their way together."""
_PAIR_THREADS = 2
"""Of a group of two, of which a process may have many: one bucket is carried, the next one begins."""
_LEAST_S = 0.001
"""Least seconds: torch takes 0 for no limit."""


class GlooBroadcast:
    """A `vllm_wt_nccl.communicator.Broadcast`."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers  # gloo may write to them as long as this lives
        self.works: list[Any] = []
        """One a buffer that has been started."""

    @property
    def is_over(self) -> bool:
        """Whether gloo is done with the buffers, well or not."""
        return all(work.is_completed() for work in self.works)

    def wait(self, seconds: float) -> bool:
        return all(_is_done(work, seconds) for work in self.works)


def _is_done(work: Any, seconds: float) -> bool:
    if seconds > 0:
        # Rather than to look again and again: who receives needs the core.
        with suppress(RuntimeError):  # it is at its end, or this wait is
            work.wait(timedelta(seconds=max(_LEAST_S, seconds)))
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError as error:
        raise _typed(error) from error
    return True


class GlooCommunicator:
    """A `vllm_wt_nccl.communicator.Communicator`.

    Made by all ranks at the same time; that takes until all have come, or the seconds have passed.

    Args:
        store: By which the ranks find each other; new for each communicator.
        rank: Of this side.
        size: All ranks.
        address: Of this host, by which the others reach it.
        seconds: For making it.
        is_pair: Whether it is one of many of two ranks.

    Raises:
        WeightTransferError: A rank has not come, or cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str,
        seconds: float,
        *,
        is_pair: bool = False,
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._threads = _PAIR_THREADS if is_pair else _THREADS
        options._timeout = timedelta(seconds=max(_LEAST_S, seconds))
        try:
            self._group = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise _typed(error) from error
        # Its destructor waits for what is under way, for minutes if a peer is stopped. So that the
        # interpreter's end does not call it, there is a reference too many until `close` succeeds.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._started: list[GlooBroadcast] = []

    def broadcast(
        self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0
    ) -> GlooBroadcast:
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=max(_LEAST_S, seconds))
        self._started = [each for each in self._started if not each.is_over]
        broadcast = GlooBroadcast(buffers)
        self._started.append(broadcast)
        try:
            for buffer in buffers:
                broadcast.works.append(self._group.broadcast([buffer], options))
        except RuntimeError as error:
            raise _typed(error) from error
        return broadcast

    def close(self) -> bool:
        # gloo has no way to end what is under way before its time; and to drop the group would wait.
        if not all(each.is_over for each in self._started):
            return False
        if self._group is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            self._group = None
        return True


def _typed(error: RuntimeError) -> WeightTransferError:
    said = str(error)
    if "timed out" in said.lower() or "timeout" in said.lower():
        return Timeout(
            f"A broadcast did not come to its end in time: {said}",
            where="gloo",
            cure="look for a stopped trainer or worker; raise deadline_s if the transfer is just slow",
        )
    if "closed" in said.lower() or "reset" in said.lower() or "refused" in said.lower():
        return PeerDead(
            f"A peer has gone in the middle of a broadcast: {said}",
            where="gloo",
            cure="see which trainer or worker has ended, and its log; push again",
        )
    return TransportError(
        f"A broadcast failed: {said}",
        where="gloo",
        cure="see what gloo says; GLOO_SOCKET_IFNAME is not used, the trainer's address is",
    )
