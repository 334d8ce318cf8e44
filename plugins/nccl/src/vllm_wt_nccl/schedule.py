"""In which order the buckets of all senders come: both sides make it out from what init has said.

Each rank of the trainer has a stream of its own: its parts of the tensors, in the manifest's order,
cut into buckets. It sends a bucket when it comes to what is behind it. The workers take the buckets of
all streams in the order of the tensors at which they are sent. So where tensors are gathered on the
way, which all ranks do in that order too, nobody waits for somebody who waits for him: a rank that
waits for a buffer waits for buckets that the workers take before the one that they wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_wt.digests import BLOCK
from vllm_wt.manifest import Manifest
from vllm_wt.packing import ALIGNMENT, Buckets, Layout, Piece
from vllm_wt.pull.exposure import Exposure
from vllm_wt_nccl.cutting import Cuts, of_one


class Turn(NamedTuple):
    """One bucket.

    Args:
        sender: Rank of the trainer.
        bucket: Its number in that rank's stream.
    """

    sender: int
    bucket: int


@dataclass(frozen=True)
class Stream(Exposure):
    """What one of several ranks sends. Its parts are many and may be short, so they lie closer together
    than those of an owner whose tensors have digests of their own."""

    @cached_property
    def buckets(self) -> Buckets | None:
        tensors = tuple(t for t in self.manifest.tensors if t.nbytes)
        if not tensors:
            return None
        return Buckets(Layout(Manifest(tensors), alignment=ALIGNMENT), self.bucket_nbytes)


@dataclass(frozen=True)
class Schedule:
    """The buckets of all senders.

    Args:
        cuts: Who sends what.
        streams: Of each sender.
        slots: Most buffers that a worker receives into.
    """

    cuts: Cuts
    streams: tuple[Exposure, ...]
    slots: int

    @classmethod
    def of_one(cls, buckets: Exposure) -> Schedule:
        """Where there is one sender, and these are all of its buckets."""
        return cls(of_one(buckets.manifest), (buckets,), buckets.slots)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """All buckets, in the order in which the workers take them."""
        found = []
        for sender, stream in enumerate(self.streams):
            last, nth = -1, 0
            for bucket, at in enumerate(_behind(stream)):
                # What several send of a large tensor comes from them in turns, too.
                last, nth = at, nth + 1 if at == last else 0
                found.append((at, nth, sender, bucket))
        return tuple(Turn(sender, bucket) for _, _, sender, bucket in sorted(found))

    @cached_property
    def count(self) -> int:
        """Number of buckets."""
        return len(self.turns)

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """The ranks that have something to send."""
        return tuple(sender for sender, stream in enumerate(self.streams) if stream.count)

    @property
    def slots_used(self) -> int:
        return min(self.slots, self.count)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes that a buffer needs, in whole blocks."""
        return max((stream.slot_nbytes for stream in self.streams), default=0)

    @property
    def digested(self) -> bool:
        return self.streams[0].digested

    def blocks(self, number: int) -> int:
        """Blocks of a bucket, by its place in `turns`."""
        sender, bucket = self.turns[number]
        return self.streams[sender].digests_of(bucket)[1]

    def pieces(self, name: str) -> list[Piece]:
        """Where the bytes of a tensor come, in its order; ``bucket`` is the place in `turns`."""
        found = []
        for sender, offset, _ in self.cuts.of[name]:
            buckets = self.streams[sender].buckets
            assert buckets is not None
            for piece in buckets.pieces(name):
                number = self._numbers[Turn(sender, piece.bucket)]
                found.append(
                    piece._replace(bucket=number, tensor_offset=offset + piece.tensor_offset)
                )
        return found

    def name_at(self, number: int, block: int) -> str:
        """A tensor of a block of a bucket."""
        sender, bucket = self.turns[number]
        stream = self.streams[sender]
        assert stream.buckets is not None
        at = bucket * stream.bucket_nbytes + block * BLOCK
        found = ""
        for slot in stream.buckets.layout.slots:
            if slot.offset > at:
                break
            found = slot.tensor.name
        return found

    @cached_property
    def _numbers(self) -> Mapping[Turn, int]:
        return {turn: number for number, turn in enumerate(self.turns)}


def _behind(stream: Exposure) -> list[int]:
    """Of each bucket, the index of the tensor that begins the next one; past all for the last."""
    if stream.buckets is None:
        return []
    begins = [len(stream.manifest)] * (stream.count + 1)
    for index, tensor in enumerate(stream.manifest.tensors):
        for piece in stream.buckets.pieces(tensor.name) if tensor.nbytes else ():
            begins[piece.bucket] = min(begins[piece.bucket], index)
    return begins[1:]
