"""One ``copy_`` from mapped memory, which ``vllm-wt bench wire`` holds the backend against."""

from __future__ import annotations

import json

import torch

from vllm_wt.deadline import Deadline
from vllm_wt_ipc.transport import IpcTransport

_OPEN_S = 60.0
_GENERATION = 1


class IpcCopy:
    """Maps a buffer once, and copies the whole of it by torch each time.

    Args:
        name: Name of the endpoint.
        device: Where its buffer lives.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._transport = IpcTransport(name, device)

    def expose(self, buffer: torch.Tensor) -> str:
        """Expose the bytes of a contiguous uint8 buffer, from shared memory; as JSON."""
        if not IpcTransport.exposable(buffer):
            shared = IpcTransport.allocate(buffer.numel(), self._device)
            buffer = shared.copy_(buffer)
        self._settle()
        region = self._transport.register([buffer])
        return self._transport.expose(region, _GENERATION).decode()

    def progress(self) -> None:
        """Let the reader in."""
        self._transport.progress()

    def connect(self, handle: str, target: torch.Tensor, parts: int) -> None:
        """Map the exposed buffer, to be read into ``target``, of the same size."""
        del parts  # it goes as one
        owner = str(json.loads(handle)["owner"])
        self._transport.open(owner, _GENERATION, handle.encode(), Deadline(_OPEN_S))
        (self._source,) = self._transport.map(owner)
        self._target = target

    def read(self, deadline: Deadline) -> None:
        """Read once; returns when every byte is there."""
        self._target.copy_(self._source)
        self._settle()
        deadline.check("The raw copy took too long", where="bench")

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
