"""Which of the owner's digests are compared with what a worker has, and what a difference says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vllm_wt.digests import BLOCK, blocks
from vllm_wt.errors import CorruptTransfer
from vllm_wt.loading.slices import Runs
from vllm_wt.pull.exposure import Exposure


def expected_blocks(
    exposure: Exposure, names: Iterable[str], runs: Mapping[str, Runs]
) -> torch.Tensor:
    """Index of the owner's digest of each block that is needed, in order; dtype int64.

    Args:
        exposure: Has digests.
        names: Of the tensors.
        runs: What is needed of each.
    """
    parts = [
        torch.arange(first, first + blocks(nbytes))
        for name in names
        for offset, nbytes in runs[name]
        for first in (exposure.first_block[name] + offset // BLOCK,)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def corrupt(
    made: torch.Tensor, expected: torch.Tensor, names: Iterable[str], runs: Mapping[str, Runs]
) -> CorruptTransfer:
    """The error for the first block that differs; blocks are in the order of `expected_blocks`."""
    block = int((made != expected).nonzero()[0])
    behind, culprit = 0, ""
    for name in names:
        behind += sum(blocks(nbytes) for _, nbytes in runs[name])
        if block < behind:
            culprit = name
            break
    return CorruptTransfer(
        f"Tensor {culprit!r} did not arrive as the trainer has it",
        where="verify",
        expected=f"digest {int(expected[block]) % 2**64:016x} of block {block}",
        got=f"digest {int(made[block]) % 2**64:016x}",
        cure="let push return before the weights change; push again; if it stays, look for a "
        "broken fabric",
    )
