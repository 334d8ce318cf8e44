"""What a digest is: the sizes and the weights that every way of making one shares."""

from __future__ import annotations

from functools import cache

BLOCK = 4096
"""Bytes that have one digest."""

WORDS = BLOCK // 8

SEED = 0x766C6C6D2D777431
"""Of the weights. Owner and reader must have the same: another seed is another wire format."""

_MASK = 2**64 - 1


def blocks(nbytes: int) -> int:
    """How many blocks, and so digests, a buffer of ``nbytes`` bytes has; an empty one has none."""
    return -(-nbytes // BLOCK)


@cache
def weights() -> tuple[int, ...]:
    """The odd 64-bit weights of a block's words: outputs of splitmix64 from `SEED`, with bit 0 set."""
    made, state = [], SEED
    for _ in range(WORDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        made.append((mixed ^ (mixed >> 31)) | 1)
    return tuple(made)


def signed_weights() -> list[int]:
    """The weights as torch's int64 holds them: the same bits."""
    return [weight - 2**64 if weight >> 63 else weight for weight in weights()]
