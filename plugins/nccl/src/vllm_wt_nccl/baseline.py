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
    """Bare broadcasts of one buffer at a time between two processes: NCCL's on CUDA, else gloo's.

    Args:
        name: Not used.
        device: Where its buffer lives.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
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

    def connect(self, handle: str, target: torch.Tensor, parts: int) -> None:
        """Prepare broadcasts into ``target``, of the same size as the exposed buffer."""
        del parts  # it goes as one
        self._buffer = target
        self._store = TCPStore(_HOST, json.loads(handle)["port"], timeout=_S)
        self._store.set("come", "")
        self._group = self._made(1)

    def read(self, deadline: Deadline) -> None:
        """One broadcast; returns when every byte is there."""
        self._store.set(f"read/{self._rounds}", "")
        self._broadcast()

    def _made(self, rank: int) -> Any:
        made = _Nccl if self._device.type == "cuda" else _Gloo
        return made(self._store, rank, self._device)

    def _broadcast(self) -> None:
        self._rounds += 1
        self._group.broadcast(self._buffer)


class _Gloo:
    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = _S
        self._group = gloo(store, rank, 2, options)

    def broadcast(self, buffer: torch.Tensor) -> None:
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([buffer], options).wait()


class _Nccl:
    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        import nccl.core as nccl

        torch.cuda.set_device(device.index or 0)
        if rank == 0:
            store.set("id", nccl.get_unique_id().as_bytes.hex())
        made = nccl.UniqueId.from_bytes(bytes.fromhex(store.get("id").decode()))
        self._communicator = nccl.Communicator.init(2, rank, made)
        self._stream: Any = torch.cuda.current_stream()

    def broadcast(self, buffer: torch.Tensor) -> None:
        self._communicator.broadcast(buffer, buffer, 0, stream=self._stream.cuda_stream)
        self._stream.synchronize()
