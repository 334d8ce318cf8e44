"""A registered table of 64-bit words in host memory: beacons of an owner, their copies at readers.

An owner's beacon holds a generation's nonce for as long as that generation may be read. A reader
reads it before and after the data: a generation that was revoked, or another process at the same
address, is noticed, which NIXL and UCX by themselves don't do.
"""

from __future__ import annotations

import torch

from vllm_wt.errors import TransportError
from vllm_wt_rdma.endpoint import Endpoint, Row
from vllm_wt_rdma.nixl import BACKEND

WORD = 8
"""Bytes of a word."""
_COUNT = 4096


class Words:
    """The table; registered once, when the first word is taken."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._values: torch.Tensor | None = None
        self._free = list(range(_COUNT))

    def take(self) -> int:
        """Reserve a word, set to 0; returns its slot."""
        if self._values is None:
            values = torch.zeros(_COUNT, dtype=torch.int64)
            self._endpoint.register("DRAM", [(values.data_ptr(), WORD * _COUNT, 0)], [values])
            self._values = values
        if not self._free:
            raise TransportError(
                "Too many generations, or owners of plans, at once",
                backend=BACKEND,
                expected=_COUNT,
                cure="revoke what is not read any more, or make another transport",
            )
        slot = self._free.pop()
        self[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        self[slot] = 0
        self._free.append(slot)

    def row(self, slot: int) -> Row:
        """Where a word lies."""
        return (self._table.data_ptr() + WORD * slot, WORD, 0)

    def __getitem__(self, slot: int) -> int:
        return int(self._table[slot])

    def __setitem__(self, slot: int, value: int) -> None:
        self._table[slot] = value

    @property
    def _table(self) -> torch.Tensor:
        if self._values is None:
            raise TransportError(
                "No word has been taken",
                backend=BACKEND,
                cure="take one first: this is a bug of the caller",
            )
        return self._values
