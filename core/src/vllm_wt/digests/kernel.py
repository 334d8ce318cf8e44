"""The Triton kernel; importing this needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_wt.digests.definition import WORDS

ROWS = 2
"""Blocks that a program reads at a time, so that enough loads are under way."""


def _digest_units(
    table: tl.tensor, weights: tl.tensor, out: tl.tensor, ROWS: tl.constexpr, WORDS: tl.constexpr
) -> None:
    """A program digests one unit: up to some tens of blocks that follow each other in memory."""
    unit = tl.program_id(0).to(tl.int64) * 3
    address = tl.load(table + unit)
    nbytes = tl.load(table + unit + 1)
    start = tl.load(table + unit + 2)
    word = tl.arange(0, WORDS)
    weight = tl.load(weights + word)[None, :]
    rows = tl.arange(0, ROWS)
    count = tl.cdiv(nbytes, WORDS * 8)
    if (address % 8 == 0) & (nbytes % (WORDS * 8) == 0):
        words = address.to(tl.pointer_type(tl.int64))
        for first in range(0, count, ROWS):
            row = first + rows
            at = row[:, None] * WORDS + word[None, :]
            value = tl.load(words + at, mask=row[:, None] < count, other=0)
            tl.store(out + start + row, tl.sum(value * weight, axis=1), mask=row < count)
    else:
        # Aligned words, of which each two that follow each other hold a word of the data. Each that
        # is read holds a byte of the data, so none is outside of the memory's last page.
        shift = (address % 8) * 8
        around = (address - address % 8).to(tl.pointer_type(tl.uint64))
        held = (address % 8 + nbytes + 7) // 8
        for first in range(0, count, ROWS):
            row = first + rows
            at = row[:, None] * WORDS + word[None, :]
            low = tl.load(around + at, mask=at < held, other=0)
            high = tl.load(around + at + 1, mask=(at + 1 < held) & (shift > 0), other=0)
            both = (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))
            left = tl.minimum(tl.maximum(nbytes - at * 8, 0), 8)
            kept = tl.where(left == 8, -1, (tl.full([], 1, tl.int64) << (left * 8 % 64)) - 1)
            value = both.to(tl.int64, bitcast=True) & kept
            tl.store(out + start + row, tl.sum(value * weight, axis=1), mask=row < count)


compiled = triton.jit(_digest_units)


def launch(table: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Digest each unit of ``table``, int64 of shape ``(units, 3)``, on the current stream."""
    compiled[(len(table),)](table, weights, out, ROWS=ROWS, WORDS=WORDS, num_warps=4)
