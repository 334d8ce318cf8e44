"""What goes through a ring, where the ring is another one than in the round before."""

from __future__ import annotations

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes, meta_of
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.pouring import Pouring
from vllm_wt.pull.ring import Filling, Ring
from vllm_wt.source import StateDictSource


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def poured(pouring, ring):
    """All buckets, one behind the other, as they are when they are ready."""
    sent: list[torch.Tensor] = []
    filling = Filling(
        ring,
        None,
        readers=1,
        have_read=lambda bucket: 1,
        ready=lambda bucket: sent.append(ring.slot(bucket)[: ring.buckets.size(bucket)].clone()),
        watch=lambda: None,
        deadline=Deadline(30),
    )
    pouring.begin()
    pouring.prepare(ring)
    pouring.pour(filling)
    return torch.cat(sent)


def test_a_ring_that_was_replaced_is_filled():
    """As after a round whose buffers a fabric may still use."""
    weights = {"a": torch.arange(3 * BLOCK // 4, dtype=torch.int32)}
    manifest = Manifest(tuple(meta_of(name, tensor) for name, tensor in weights.items()))
    exposure = Exposure(manifest, frozenset(weights), BLOCK, 2, digested=False)
    pouring = Pouring(StateDictSource(weights), manifest, frozenset(weights))
    rings = [Ring(exposure, zeros) for _ in range(2)]
    for ring in (rings[0], rings[1], rings[0]):
        weights["a"] += 1
        assert torch.equal(poured(pouring, ring), as_bytes(weights["a"]))
