"""Digests on an accelerator: a Triton kernel, or torch in int64 arithmetic, which wraps as needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch

from vllm_wt.digests.definition import BLOCK, WORDS, blocks, signed_weights

UNIT = 32
"""Blocks of one program of the kernel: enough to keep its weights, few enough to spread the work."""

SCRATCH = 4096
"""Blocks that the way without triton copies at a time: 16 MiB."""


def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.tensor(signed_weights(), dtype=torch.int64, device=device)


class TritonPlan:
    """One launch over a table of what to read.

    Args:
        parts: Contiguous uint8 tensors on one CUDA device, or on the CPU under Triton's interpreter.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        from vllm_wt.digests.kernel import launch

        self._launch = launch
        self._parts = parts  # the table holds their addresses only
        device = parts[0].device
        self._weights = _weights(device)
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._table = torch.tensor(list(_units(parts)), dtype=torch.int64).to(device)

    def run(self, out: torch.Tensor) -> None:
        """Write the digests to a contiguous int64 tensor on the device, on the current stream."""
        with self._on_device:
            self._launch(self._table, self._weights, out)


def _units(parts: list[torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """Address, bytes and index of the first digest, of up to `UNIT` blocks each."""
    start = 0
    for part in parts:
        for at in range(0, part.numel(), UNIT * BLOCK):
            nbytes = min(UNIT * BLOCK, part.numel() - at)
            yield part.data_ptr() + at, nbytes, start
            start += blocks(nbytes)


@dataclass
class _Batch:
    """Pieces that follow each other in the scratch, each at a block of its own: to, from."""

    start: int
    count: int = 0
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class TorchPlan:
    """The same without triton, through a scratch of bounded size.

    Args:
        parts: Contiguous uint8 tensors on one device.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        device = parts[0].device
        size = min(SCRATCH, sum(blocks(part.numel()) for part in parts))
        self._weights = _weights(device)
        self._scratch = torch.empty(size, WORDS, dtype=torch.int64, device=device)
        flat = self._scratch.view(-1).view(torch.uint8)
        self._batches = [_Batch(0)]
        for part in parts:
            at = 0
            while at < part.numel():
                batch = self._batches[-1]
                if batch.count == size:
                    batch = _Batch(batch.start + size)
                    self._batches.append(batch)
                nbytes = min((size - batch.count) * BLOCK, part.numel() - at)
                to = batch.count * BLOCK
                batch.copies.append((flat[to : to + nbytes], part[at : at + nbytes]))
                batch.count += blocks(nbytes)
                at += nbytes

    def run(self, out: torch.Tensor) -> None:
        """Write the digests to a contiguous int64 tensor on the device."""
        for batch in self._batches:
            words = self._scratch[: batch.count]
            words.zero_()
            for to, piece in batch.copies:
                to.copy_(piece)
            words.mul_(self._weights)
            torch.sum(words, 1, out=out[batch.start : batch.start + batch.count])
