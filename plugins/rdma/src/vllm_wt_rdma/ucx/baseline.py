"""Bare messages of UCXX, which ``vllm-wt bench wire`` holds the backend against."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt_rdma import nixl
from vllm_wt_rdma.ucx import bindings, memory
from vllm_wt_rdma.ucx.batching import CHUNK_BYTES

_ADDRESS, _GO, _DATA = 1, 2, 3
"""Tags of the reader's address, of its wish for another read, and of the bytes."""
_IN_FLIGHT = 4
"""Messages on their way at a time, as in the backend."""
_MOST_ADDRESS = 1 << 16


class UcxMessages:
    """A bare UCX worker that reads one buffer, in messages of the backend's size.

    Args:
        name: Not used: UCX knows workers by their addresses.
        device: Where its buffer lives.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        del name
        if device.type == "cuda":
            nixl.use_cuda(torch.device("cuda", device.index or 0))
        build = bindings.load()
        self._api, self._array = build.api, build.array
        self._context = self._api.UCXContext(
            config_dict=build.options(), feature_flags=(self._api.Feature.TAG,)
        )
        self._worker = self._api.UCXWorker(self._context)
        self._peer: Any = None
        self._said: list[tuple[Any, bytes]] = []
        self._heard = bytearray(_MOST_ADDRESS)
        self._left: list[torch.Tensor] = []
        self._moving: list[Any] = []
        self._hear(_ADDRESS)

    def expose(self, buffer: torch.Tensor) -> str:
        """Offer a contiguous uint8 buffer; what ``connect`` needs, as JSON."""
        self._parts = _parts_of(buffer)
        return json.dumps({"address": base64.b64encode(self._worker.address.tobytes()).decode()})

    def progress(self) -> None:
        """Drive the owner's side, to the end of a read that has begun."""
        self._worker.progress()
        if self._hearing.completed:
            self._hearing.check_error()
            if self._peer is None:
                self._connect(bytes(self._heard))
            else:
                self._left = list(self._parts)
            self._hear(_GO)
        while self._left or self._moving:
            self._move(self._send)

    def connect(self, handle: str, target: torch.Tensor) -> None:
        """Prepare reads of the exposed buffer into ``target``, of the same size."""
        self._parts = _parts_of(target)
        self._connect(base64.b64decode(json.loads(handle)["address"]))
        self._say(self._worker.address.tobytes(), _ADDRESS)

    def read(self, deadline: Deadline) -> None:
        """Read once; returns when every byte is there."""
        self._left = list(self._parts)
        self._say(b"go", _GO)
        while self._left or self._moving:
            deadline.check("The raw read has not completed", where="bench")
            self._move(self._receive)

    def _move(self, begin: Any) -> None:
        """Keep a few messages on their way."""
        while self._left and len(self._moving) < _IN_FLIGHT:
            self._moving.append(begin(self._left.pop(0)))
        self._worker.progress()
        for request in [each for each in self._moving if each.completed]:
            request.check_error()
            self._moving.remove(request)

    def _send(self, part: torch.Tensor) -> Any:
        return self._peer.tag_send(self._array(memory.view(part)), self._api.UCXXTag(_DATA))

    def _receive(self, part: torch.Tensor) -> Any:
        return self._worker.tag_recv(self._array(memory.view(part)), self._api.UCXXTag(_DATA))

    def _connect(self, address: bytes) -> None:
        found = self._api.UCXAddress.create_from_buffer(bytearray(address))
        self._peer = self._api.UCXEndpoint.create_from_worker_address(self._worker, found, True)

    def _hear(self, tag: int) -> None:
        self._hearing = self._worker.tag_recv(self._array(self._heard), self._api.UCXXTag(tag))

    def _say(self, data: bytes, tag: int) -> None:
        self._said = [each for each in self._said if not each[0].completed]
        request = self._peer.tag_send(self._array(data), self._api.UCXXTag(tag))
        self._said.append((request, data))


def _parts_of(buffer: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[at : at + CHUNK_BYTES] for at in range(0, buffer.numel(), CHUNK_BYTES)]
