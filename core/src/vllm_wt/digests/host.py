"""Digests on a CPU: numpy's einsum over the memory of the tensors, which runs as fast as memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm_wt.digests.definition import BLOCK, WORDS, blocks, weights

Array: TypeAlias = np.ndarray[Any, Any]

_WORD = np.dtype("<u8")

SCRATCH = 64
"""Blocks that are gathered before they are digested: 256 KiB, which stay in a core's cache."""

SMALL = 4
"""Blocks up to which a buffer is gathered: a copy of so few costs less than a call of einsum."""


class _Memory:
    """A tensor's bytes, for numpy to make an array of.

    ``Tensor.numpy()`` would forbid for good that the storage is resized, which FSDP does each step.
    """

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part
        self.__array_interface__ = {
            "data": (part.data_ptr(), False),
            "shape": (part.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


def _array(part: torch.Tensor) -> Array:
    """A contiguous uint8 tensor as numpy sees it, without a copy."""
    return np.asarray(_Memory(part))


@dataclass(frozen=True)
class _Direct:
    """Whole blocks, read where they are.

    Args:
        words: Shape ``(blocks, WORDS)``. Where the memory is not aligned to words, numpy copies it
            through a small buffer of its own.
        start: Index of the first digest.
    """

    words: Array
    start: int


@dataclass
class _Gathered:
    """Pieces to copy into the scratch, each at a block of its own.

    Args:
        copies: To, from.
        index: Index of each block's digest.
        padded: Whether some piece ends within a block.
    """

    copies: list[tuple[Array, Array]] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    padded: bool = False


@lru_cache(maxsize=1)
def _weights() -> Array:
    return np.array(weights(), np.uint64)


class HostPlan:
    """How to digest some buffers; `run` is not for several threads at once.

    Args:
        parts: Contiguous uint8 tensors on the CPU.
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._weights = _weights()
        small = sum(blocks(part.numel()) for part in parts)  # more than will be gathered, often
        self._scratch = np.zeros((min(SCRATCH, small), WORDS), _WORD)
        self._flat = self._scratch.reshape(-1).view(np.uint8)
        self._sums = np.empty(SCRATCH, np.uint64)
        self._direct: list[_Direct] = []
        gathered: list[_Gathered] = []
        start = 0
        for part in parts:
            count = blocks(part.numel())
            if count:
                array = _array(part)
                whole = part.numel() // BLOCK if count > SMALL else 0
                if whole:
                    words = array[: whole * BLOCK].view(_WORD).reshape(whole, WORDS)
                    self._direct.append(_Direct(words, start))
                if whole < count:
                    self._gather(gathered, array[whole * BLOCK :], start + whole, count - whole)
            start += count
        self._batches = [(np.array(g.index), g.copies, g.padded) for g in gathered]

    def _gather(self, gathered: list[_Gathered], piece: Array, start: int, count: int) -> None:
        if not gathered or len(gathered[-1].index) + count > len(self._scratch):
            gathered.append(_Gathered())
        batch = gathered[-1]
        at = len(batch.index) * BLOCK
        batch.copies.append((self._flat[at : at + piece.size], piece))
        batch.index.extend(range(start, start + count))
        batch.padded |= piece.size % BLOCK != 0

    def run(self, out: torch.Tensor) -> None:
        """Write the digests to a contiguous int64 tensor on the CPU."""
        digests = _array(out.view(torch.uint8)).view(np.uint64)
        for direct in self._direct:
            end = direct.start + len(direct.words)
            np.einsum("ij,j->i", direct.words, self._weights, out=digests[direct.start : end])
        for index, copies, padded in self._batches:
            if padded:
                self._flat[: len(index) * BLOCK].fill(0)
            for to, piece in copies:
                to[...] = piece
            sums = self._sums[: len(index)]
            np.einsum("ij,j->i", self._scratch[: len(index)], self._weights, out=sums)
            digests[index] = sums
