"""How a trainer's tensors lie in what is broadcast: both sides make it out from what init has said."""

from __future__ import annotations

import torch

from vllm_wt.digests import BLOCK
from vllm_wt.info import Verify
from vllm_wt.manifest import Manifest
from vllm_wt.pull.exposure import Exposure
from vllm_wt_nccl.cutting import Cuts
from vllm_wt_nccl.schedule import Schedule, Stream

_SLOTS = {"cpu": 4, "cuda": 3}
"""Buffers on each side. Some are on their way, one is filled or emptied, one is for whoever is ahead;
gloo takes its time between two operations, which several on their way make up for."""


_HOST_NBYTES = 4 << 20
"""Of a bucket between CPUs, unless a size is asked for: what is packed is still in a cache when it is
digested and sent."""
_LEAST_NBYTES, _MOST_NBYTES = 8 << 20, 256 << 20
"""The same between GPUs: of less the calls take the time, more is no faster."""
_BUCKETS = 8
"""That a rank of the trainer sends of few weights between GPUs. Nothing is on its way while the first
is packed and the last is loaded, which takes a GPU little time; and a link runs empty between two, for
1.8 ms where NCCL goes through sockets."""


def default_nbytes(manifest: Manifest, device: torch.device, senders: int = 1) -> int:
    """Size of a bucket, unless one is asked for.

    Args:
        manifest: Of the trainer.
        device: Of its buffers.
        senders: Ranks that send: workers have two buckets for each.
    """
    if device.type != "cuda":
        return _HOST_NBYTES
    each = -(-manifest.nbytes // (_BUCKETS * senders * BLOCK)) * BLOCK
    most = _MOST_NBYTES // senders // BLOCK * BLOCK
    return int(max(_LEAST_NBYTES, min(each, most)))


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
    return Exposure(
        manifest, _names(manifest), bucket_nbytes, _SLOTS[device.type], verify == "digest"
    )


def scheduled(cuts: Cuts, bucket_nbytes: int, verify: Verify, device: torch.device) -> Schedule:
    """The same of several ranks that send. Two buckets of each can be on their way to a worker.

    Args:
        cuts: Who sends what.
        bucket_nbytes: As of `bucketing`.
        verify: As of `bucketing`.
        device: As of `bucketing`.
    """
    if cuts.senders == 1:
        return Schedule.of_one(bucketing(cuts.manifest, bucket_nbytes, verify, device))
    slots = _SLOTS[device.type]
    streams = []
    for sender in range(cuts.senders):
        own = cuts.own(sender)
        streams.append(Stream(own, _names(own), bucket_nbytes, slots, verify == "digest"))
    return Schedule(cuts, tuple(streams), max(slots, 2 * cuts.senders + 1))


def _names(manifest: Manifest) -> frozenset[str]:
    return frozenset(tensor.name for tensor in manifest.tensors if tensor.nbytes)
