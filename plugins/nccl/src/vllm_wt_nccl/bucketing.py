"""How a trainer's tensors lie in what is broadcast: both sides make it out from the manifest."""

from __future__ import annotations

import torch

from vllm_wt.info import Verify
from vllm_wt.manifest import Manifest
from vllm_wt.pull.exposure import Exposure

_SLOTS = {"cpu": 8, "cuda": 3}
"""Buffers on each side. Some are on their way, one is filled or emptied, one is for whoever is ahead;
gloo takes its time between two operations, which several on their way make up for."""


def bucketing(
    manifest: Manifest, bucket_nbytes: int, verify: Verify, device: torch.device
) -> Exposure:
    """All tensors of the manifest, one after another, in buckets.

    Args:
        manifest: Of the trainer.
        bucket_nbytes: Size of a bucket.
        verify: Whether blocks have digests.
        device: Of this side's buffers.
    """
    names = frozenset(tensor.name for tensor in manifest.tensors if tensor.nbytes)
    return Exposure(manifest, names, bucket_nbytes, _SLOTS[device.type], verify == "digest")
