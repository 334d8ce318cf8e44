"""Bare messages of UCXX, which ``vllm-wt bench wire`` holds the backend against."""

from __future__ import annotations

import base64
import json
from collections import deque
from itertools import pairwise
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt_rdma import nixl
from vllm_wt_rdma.ucx import bindings, memory
from vllm_wt_rdma.ucx.batching import CHUNK_BYTES

_ADDRESS, _PARTS, _GO, _DATA = 1, 2, 3, 4
"""Tags of the reader's address, of how many tensors there are, of its wish for another read, and of the
bytes."""
_IN_FLIGHT = 32
_IN_FLIGHT_BYTES = 4 * CHUNK_BYTES
"""Most messages, and bytes of them, that are on their way, as in the backend."""
_MOST_ADDRESS = 1 << 16


class UcxMessages:
    """A bare UCX worker that reads one buffer: a message a tensor, in pieces of the backend's size.

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
        self._context = build.context()
        self._worker = self._api.UCXWorker(self._context)
        self._tag = self._api.UCXXTag(_DATA)
        self._peer: Any = None
        self._said: list[tuple[Any, bytes]] = []
        self._heard = bytearray(_MOST_ADDRESS)
        self._left: deque[tuple[Any, int]] = deque()
        self._moving: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._hear(_ADDRESS)

    def expose(self, buffer: torch.Tensor) -> str:
        """Offer a contiguous uint8 buffer; what ``connect`` needs, as JSON."""
        self._buffer = buffer
        return json.dumps({"address": base64.b64encode(self._worker.address.tobytes()).decode()})

    def progress(self) -> None:
        """Drive the owner's side, to the end of a read that has begun."""
        self._worker.progress()
        if self._hearing.completed:
            self._hearing.check_error()
            if self._peer is None:
                self._connect(bytes(self._heard))
                self._hear(_PARTS)
                return
            if self._heard_tag == _PARTS:
                self._parts = self._cut(self._buffer, int.from_bytes(self._heard[:8], "big"))
            else:
                self._left.extend(self._parts)
            self._hear(_GO)
        while self._left or self._moving:
            self._move(self._peer.tag_send)

    def connect(self, handle: str, target: torch.Tensor, parts: int) -> None:
        """Prepare reads of the exposed buffer into ``target``, of its size, as so many tensors."""
        self._parts = self._cut(target, parts)
        self._connect(base64.b64decode(json.loads(handle)["address"]))
        self._say(self._worker.address.tobytes(), _ADDRESS)
        self._say(parts.to_bytes(8, "big"), _PARTS)

    def read(self, deadline: Deadline) -> None:
        """Read once; returns when every byte is there."""
        self._left.extend(self._parts)
        self._say(b"go", _GO)
        while self._left or self._moving:
            deadline.check("The raw read has not completed", where="bench")
            self._move(self._worker.tag_recv)

    def _move(self, begin: Any) -> None:
        """Keep some messages on their way; they end in the order in which they were begun."""
        while self._left and (
            not self._moving
            or (
                len(self._moving) < _IN_FLIGHT
                and self._bytes + self._left[0][1] <= _IN_FLIGHT_BYTES
            )
        ):
            part, nbytes = self._left.popleft()
            self._moving.append((begin(part, self._tag), nbytes))
            self._bytes += nbytes
        self._worker.progress()
        while self._moving and self._moving[0][0].completed:
            request, nbytes = self._moving.popleft()
            self._bytes -= nbytes
            request.check_error()

    def _cut(self, buffer: torch.Tensor, parts: int) -> list[tuple[Any, int]]:
        """A buffer as so many tensors of about the same size, and these as messages."""
        edges = [buffer.numel() * number // parts for number in range(parts + 1)]
        pieces = [
            buffer[at : min(at + CHUNK_BYTES, end)]
            for start, end in pairwise(edges)
            for at in range(start, end, CHUNK_BYTES)
        ]
        return [(self._array(memory.view(piece)), piece.numel()) for piece in pieces]

    def _connect(self, address: bytes) -> None:
        found = self._api.UCXAddress.create_from_buffer(bytearray(address))
        self._peer = self._api.UCXEndpoint.create_from_worker_address(self._worker, found, True)

    def _hear(self, tag: int) -> None:
        self._heard_tag = tag
        self._hearing = self._worker.tag_recv(self._array(self._heard), self._api.UCXXTag(tag))

    def _say(self, data: bytes, tag: int) -> None:
        self._said = [each for each in self._said if not each[0].completed]
        request = self._peer.tag_send(self._array(data), self._api.UCXXTag(tag))
        self._said.append((request, data))
