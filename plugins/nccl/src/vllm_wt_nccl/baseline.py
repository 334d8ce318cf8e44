"""One raw broadcast, which ``vllm-wt bench wire`` holds the backend against."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vllm_wt.deadline import Deadline

_HOST = "127.0.0.1"
_S = timedelta(seconds=120)


class RawBroadcast:
    """A bare process group of two that broadcasts one buffer at a time.

    Args:
        name: Not used.
        device: Where its buffer lives.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._store: Any = None
        self._group: Any = None
        self._rounds = 0

    def expose(self, buffer: torch.Tensor) -> str:
        """A contiguous uint8 buffer; what ``connect`` needs, as JSON."""
        self._buffer = buffer
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_S)
        return json.dumps({"port": self._store.port})

    def progress(self) -> None:
        """Take part in what the other side has begun."""
        if self._store is None:
            return
        if self._group is None and self._store.check(["come"]):
            self._group = self._made(0)
        if self._group is not None and self._store.check([f"read/{self._rounds}"]):
            self._broadcast()

    def connect(self, handle: str, target: torch.Tensor) -> None:
        """Prepare broadcasts into ``target``, of the same size as the exposed buffer."""
        self._buffer = target
        self._store = TCPStore(_HOST, json.loads(handle)["port"], timeout=_S)
        self._store.set("come", "")
        self._group = self._made(1)

    def read(self, deadline: Deadline) -> None:
        """One broadcast; returns when every byte is there."""
        self._store.set(f"read/{self._rounds}", "")
        self._broadcast()

    def _made(self, rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = _S
        return gloo(self._store, rank, 2, options)

    def _broadcast(self) -> None:
        self._rounds += 1
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([self._buffer], options).wait()
