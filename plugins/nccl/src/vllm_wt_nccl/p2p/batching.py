"""From copies to buckets: merged, and cut where a bucket is full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from vllm_wt.transport import Copy
from vllm_wt_nccl.p2p.messages import Fabric

BUCKET_BYTES = {Fabric.GLOO: 4 << 20, Fabric.NCCL: 64 << 20}
"""Most bytes of a bucket. Host memory: three of them are less than a quarter of what a small model has,
and the cost of one more is some tens of microseconds. GPUs: what a bucket costs both sides' processors,
some tenths of a millisecond, is less than it takes to cross."""
SLOTS = 3
"""Buckets of a connection on their way: one is packed, one is sent, one is put in its places."""


@dataclass
class Bucket:
    """Copies that cross together, in the order of its bytes."""

    copies: list[Copy] = field(default_factory=list)
    nbytes: int = 0


def bucketed(copies: Iterable[Copy], most: int) -> list[Bucket]:
    """The buckets of one owner, for copies that are checked.

    Args:
        copies: All of this owner.
        most: Bytes of a bucket.
    """
    buckets: list[Bucket] = []
    for copy in _merged(copies):
        done = 0
        while done < copy.nbytes:
            if not buckets or buckets[-1].nbytes == most:
                buckets.append(Bucket())
            bucket = buckets[-1]
            nbytes = min(copy.nbytes - done, most - bucket.nbytes)
            bucket.copies.append(
                replace(
                    copy,
                    source_offset=copy.source_offset + done,
                    target_offset=copy.target_offset + done,
                    nbytes=nbytes,
                )
            )
            bucket.nbytes += nbytes
            done += nbytes
    return buckets


def _merged(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Neighbours that are contiguous on both sides, joined."""
    last: Copy | None = None
    for copy in copies:
        if last is None:
            last = copy
        elif (
            (last.source, last.target) == (copy.source, copy.target)
            and last.source_offset + last.nbytes == copy.source_offset
            and last.target_offset + last.nbytes == copy.target_offset
        ):
            last = replace(last, nbytes=last.nbytes + copy.nbytes)
        else:
            yield last
            last = copy
    if last is not None:
        yield last
