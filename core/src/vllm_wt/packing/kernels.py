"""Copies between addresses in a GPU's memory by one kernel. The only module that imports Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_wt.packing.host import Run

_WIDE = 16
"""Bytes of the widest load; addresses must be multiples of it."""
_TILE = 32 << 10
"""Bytes that one program copies. With larger ones, and with smaller blocks, an H200 was slower."""
_BYTE_TILE = 4 << 10
"""The same where each load is of one byte."""
_BLOCK = 4096
"""Elements that a program copies at once: 8 bytes each, or one."""
_WARPS = 16


class DeviceCopies:
    """Prepared copies of a GPU's memory; the caller sees to it that it stays where it is.

    Args:
        runs: What to copy, in any order; they may not depend on each other. Several, or a table of
            them: shape ``(runs, 3)``, dtype int64.
        device: Where the memory is. Under Triton's interpreter, the CPU.
    """

    def __init__(self, runs: Sequence[Run] | torch.Tensor, device: torch.device) -> None:
        heads, rests = _split(torch.as_tensor(runs, dtype=torch.int64).view(-1, 3))
        tables = ((_tiles(rests, _TILE), True), (_tiles(heads, _BYTE_TILE), False))
        # From pageable memory: they are there when this returns, for whatever stream.
        self._tables = [(table.to(device), is_wide) for table, is_wide in tables if len(table)]

    def run(self) -> None:
        """Start them all on the current stream of the current device, which is that of the memory."""
        for table, is_wide in self._tables:
            if table.is_cuda:  # else its memory could be given away before the kernel has read it
                table.record_stream(torch.cuda.current_stream())
            _copy_tiles[(len(table),)](table, is_wide, _BLOCK, num_warps=_WARPS)


def warm_up(device: torch.device) -> None:
    """Compile what is copied by, which takes seconds the first time."""
    memory = torch.zeros(2 * _TILE, dtype=torch.uint8, device=device)
    first = memory.data_ptr()
    with torch.cuda.device(device):
        DeviceCopies([Run(first, first + _TILE, _TILE - 1), Run(first, first + 1, 1)], device).run()
        torch.cuda.synchronize(device)


def _split(runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts to copy by bytes, and the rests, which start at multiples of the widest load."""
    to, source, nbytes = runs.unbind(1)
    head = torch.where((to - source) % _WIDE != 0, nbytes, torch.minimum(nbytes, -to % _WIDE))
    rest = torch.stack((to + head, source + head, nbytes - head), 1)
    return torch.stack((to, source, head), 1), rest


def _tiles(table: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Runs cut into tiles of at most ``nbytes`` bytes; shape ``(tiles, 3)``, dtype int64."""
    counts = (table[:, 2] + nbytes - 1) // nbytes
    first = counts.cumsum(0) - counts
    done = (torch.arange(int(counts.sum())) - first.repeat_interleave(counts)) * nbytes
    to, source, size = table.repeat_interleave(counts, 0).unbind(1)
    return torch.stack((to + done, source + done, (size - done).clamp(max=nbytes)), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tiles(table: tl.tensor, wide: tl.constexpr, block: tl.constexpr) -> None:
    row = table + tl.program_id(0).to(tl.int64) * 3
    to = tl.load(row)
    source = tl.load(row + 1)
    nbytes = tl.load(row + 2)
    if wide:
        # Said of the pointers, for loads of 16 bytes each.
        to_words = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
        source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        words = nbytes // 16 * 2
        for start in range(0, words, block):
            at = start + tl.arange(0, block)
            word = tl.load(source_words + at, mask=at < words)
            tl.store(to_words + at, word, mask=at < words)
        done = words * 8
        _copy_bytes(to, source, done, nbytes, 16)
    else:
        for start in range(0, nbytes, block):
            _copy_bytes(to, source, start, nbytes, block)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_bytes(
    to: tl.tensor, source: tl.tensor, start: tl.tensor, nbytes: tl.tensor, block: tl.constexpr
) -> None:
    at = start + tl.arange(0, block)
    byte = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=at < nbytes)
    tl.store(to.to(tl.pointer_type(tl.uint8)) + at, byte, mask=at < nbytes)
