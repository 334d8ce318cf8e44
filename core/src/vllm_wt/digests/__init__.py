"""64-bit digests of blocks of bytes, by which a reader checks what it received.

A buffer of n bytes is cut into blocks of `BLOCK` (4096) bytes, the last one padded with zeros. With
x_0 .. x_511 a block's little-endian 64-bit words, its digest is

    sum(w_j * x_j) mod 2**64

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with
fixed weights w_j: outputs of splitmix64 from a constant seed, made odd. It is the same on every
device and for every dtype, alignment and order in which blocks are made, and as fast as memory.

What it sees, of a fault that knows nothing of the weights:

- A change within one word always, since the weights are odd.
- A change of several words with a chance of a miss of 2**-(63 - k) at most, where 2**k is the largest
  power of two that divides what was added to every one of them. A fault that reaches the low bits of
  words, as bytes of another tensor, another version or nothing at all do, has a k near 0.
- Where only the high bits of a few words have changed, k is large: at least 48, a miss in 2**15, where
  each changed element of bfloat16 is the fourth in its word. Of swaps of two such elements of random
  weights one in 1000 is missed, of all other swaps of two elements none in millions. An even number
  of flips of the very top bit of words within one block, and nothing else, is never seen.

A digest doesn't tell where its block was: compare block by block, so that swapped blocks are seen.
Nor does it tell how long the last block was before its padding. It guards against faults and not
against a peer that forges: it is not cryptographic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_wt.digests.definition import BLOCK, blocks
from vllm_wt.errors import ManifestMismatch
from vllm_wt.exposed import is_plain
from vllm_wt.packing import as_bytes

__all__ = ["BLOCK", "Digests", "blocks", "digest"]


class _Plan(Protocol):
    def run(self, out: torch.Tensor) -> None: ...


class Digests:
    """The digests of some buffers, prepared once and made as often as wanted.

    A run reads the buffers where they were at first and allocates next to nothing: whoever gives a
    buffer other memory makes a new one. On a CPU a run works in the calling thread, mostly without
    the GIL, and has a scratch of its own: one run at a time. On CUDA a run is one kernel, where
    triton is installed; keep the object until it has ended.

    Args:
        buffers: Contiguous tensors of any dtype and shape, all on one device; taken as their bytes.

    Raises:
        ManifestMismatch: A buffer is not contiguous, or they are on several devices.
    """

    count: int
    """Digests that a run makes: the blocks of all buffers together."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        parts = [_bytes_of(buffer, at) for at, buffer in enumerate(buffers)]
        self._device = _one_device(parts)
        self.count = sum(blocks(part.numel()) for part in parts)
        self._plan = _plan(parts, self._device) if self.count else None

    def run(self, out: torch.Tensor) -> None:
        """Make the digests of buffer 0's blocks, then of buffer 1's, and so on.

        On CUDA this is asynchronous, on the current stream.

        Args:
            out: Where to; int64 (the bits of the unsigned digest), shape ``(count,)``, contiguous, on
                the buffers' device. Must not overlap them.

        Raises:
            ManifestMismatch: ``out`` is anything else; nothing is written.
        """
        fits = (
            out.dtype == torch.int64
            and tuple(out.shape) == (self.count,)
            and (self._device is None or out.device == self._device)
            and is_plain(out)
        )
        if not fits:
            raise ManifestMismatch(
                "The digests don't fit into what they are to be written to",
                where="digests",
                expected=f"contiguous torch.int64 [{self.count}] on {self._device or 'any device'}",
                got=f"{out.dtype} {list(out.shape)} with strides {list(out.stride())} on {out.device}",
                cure="make it with torch.empty(digests.count, dtype=torch.int64) on that device",
            )
        if self._plan is not None:
            self._plan.run(out)


def digest(data: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The digest of each block of a tensor's bytes.

    On CUDA this is asynchronous, on the current stream. For the same buffers again and again, or for
    many, prepare `Digests`.

    Args:
        data: Contiguous; any dtype and shape.
        out: Where to; made if None. Int64, shape ``(blocks(nbytes),)``, on the device of ``data``.

    Returns:
        ``out``: the bits of each unsigned digest as int64.

    Raises:
        ManifestMismatch: ``data`` is not contiguous, or ``out`` does not fit.
    """
    digests = Digests([data])
    if out is None:
        out = torch.empty(digests.count, dtype=torch.int64, device=data.device)
    digests.run(out)
    return out


def _bytes_of(buffer: torch.Tensor, at: int) -> torch.Tensor:
    if not is_plain(buffer):
        raise ManifestMismatch(
            f"Buffer {at} doesn't hold its values in order, so its bytes have no digest",
            where="digests",
            expected="a contiguous tensor that is not lazily negated or conjugated",
            got=f"{buffer.dtype} {list(buffer.shape)} with strides {list(buffer.stride())}",
            cure="pass its .contiguous() copy, with .resolve_neg() and .resolve_conj()",
        )
    return as_bytes(buffer)


def _one_device(parts: list[torch.Tensor]) -> torch.device | None:
    devices = {part.device for part in parts}
    if len(devices) > 1:
        raise ManifestMismatch(
            "The buffers to digest are on several devices",
            where="digests",
            expected="one device",
            got=", ".join(sorted(map(str, devices))),
            cure="prepare one Digests for each device",
        )
    return next(iter(devices), None)


def _plan(parts: list[torch.Tensor], device: torch.device | None) -> _Plan:
    if device is None or device.type == "cpu":
        from vllm_wt.digests.host import HostPlan

        return HostPlan(parts)
    from vllm_wt.digests.device import TorchPlan, TritonPlan, has_triton

    return TritonPlan(parts) if device.type == "cuda" and has_triton() else TorchPlan(parts)
