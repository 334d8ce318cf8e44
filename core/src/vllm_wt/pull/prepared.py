"""Tensors that stay where they are and go through the ring all the same: copied as one a bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_wt.packing import Copies, as_bytes
from vllm_wt.pull.ring import Ring


class Prepared:
    """The copies into every bucket, made ready once.

    Args:
        ring: Whose slots they go to.
        tensors: All that go through it, contiguous.
    """

    def __init__(self, ring: Ring, tensors: Mapping[str, torch.Tensor]) -> None:
        self.ring = ring
        self._places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [] for _ in range(ring.buckets.count)
        ]
        for name, tensor in tensors.items():
            data = as_bytes(tensor)
            for piece in ring.buckets.pieces(name):
                slot = ring.slot(piece.bucket)[piece.offset : piece.offset + piece.nbytes]
                source = data[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
                pairs[piece.bucket].append((slot, source))
        self._copies = [Copies(pair) for pair in pairs]

    def made_of(self, ring: Ring, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether this is the ring, and these are where they were then, with their memory."""
        return (
            self.ring is ring
            and self._places == {n: t.data_ptr() for n, t in tensors.items()}
            and all(copies.in_place for copies in self._copies)
        )

    def into(self, bucket: int) -> Copies:
        return self._copies[bucket]
