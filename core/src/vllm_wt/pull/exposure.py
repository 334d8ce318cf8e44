"""What an owner's region consists of: both sides make it out from the same init info.

Its buffers, in this order: the tensors that are read where they are, in the manifest's order without
the empty ones; the slots of the ring that the others come through, if there are others; the digests of
all blocks, if they are verified; the signals. All are on one device, but the signals of memory that is
mapped are in host memory: a GPU takes as long for a word as for a megabyte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vllm_wt.digests import BLOCK, blocks
from vllm_wt.errors import InvalidInfo
from vllm_wt.info import PullInitInfo
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import Buckets, Layout

SIGNAL_WORDS = 3
"""Words of the signals: see `DIGESTED`, `READY` and `WITHDRAWN`."""
DIGESTED = 0
"""The ticket for which all tensors that are read in place have their digests."""
READY = 1
"""The number (`Exposure.number`) of the newest bucket that can be read; without buckets, the newest
ticket whose memory is as it will stay."""
WITHDRAWN = 2
"""The newest ticket that is over: what is mapped may have changed since."""
WORD = 8
"""Bytes of a signal and of a digest."""


@dataclass(frozen=True)
class Exposure:
    """The owner's buffers.

    Args:
        manifest: The owner's tensors.
        packed: Names of those that come through the ring.
        bucket_nbytes: Size of a slot of the ring; a multiple of `BLOCK`.
        slots: Slots of the ring.
        digested: Whether blocks have digests.
    """

    manifest: Manifest
    packed: frozenset[str]
    bucket_nbytes: int
    slots: int
    digested: bool

    @classmethod
    def of(cls, info: PullInitInfo, manifest: Manifest) -> Exposure:
        """As an owner describes it.

        Raises:
            InvalidInfo: It makes no sense.
        """
        names: list[str] = []
        for first, count in info.packed:
            if first + count > len(manifest):
                raise InvalidInfo(
                    "The owner packs tensors that it does not have",
                    where="packed",
                    expected=f"below {len(manifest)}",
                    got=f"{count} from {first}",
                    cure="both sides must run the same vllm-wt release",
                )
            names += [tensor.name for tensor in manifest.tensors[first : first + count]]
        if info.packed and (info.slots < 1 or not info.bucket_nbytes or info.bucket_nbytes % BLOCK):
            raise InvalidInfo(
                "The owner's ring makes no sense",
                where="bucket_nbytes",
                expected=f"slots of a multiple of {BLOCK} bytes",
                got=f"{info.slots} slots of {info.bucket_nbytes} bytes",
                cure="both sides must run the same vllm-wt release",
            )
        return cls(
            manifest, frozenset(names), info.bucket_nbytes, info.slots, info.verify == "digest"
        )

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The packed tensors as index of the first and count, as they cross."""
        found: list[list[int]] = []
        for index, tensor in enumerate(self.manifest.tensors):
            if tensor.name in self.packed:
                if found and sum(found[-1]) == index:
                    found[-1][1] += 1
                else:
                    found.append([index, 1])
        return tuple((first, count) for first, count in found)

    @cached_property
    def in_place(self) -> tuple[TensorMeta, ...]:
        """The tensors that are read where they are."""
        return tuple(t for t in self.manifest.tensors if t.nbytes and t.name not in self.packed)

    @cached_property
    def buckets(self) -> Buckets | None:
        """The others, one after another, in buckets."""
        tensors = tuple(t for t in self.manifest.tensors if t.nbytes and t.name in self.packed)
        if not tensors:
            return None
        return Buckets(Layout(Manifest(tensors), alignment=BLOCK), self.bucket_nbytes)

    @cached_property
    def count(self) -> int:
        """Number of buckets."""
        return 0 if self.buckets is None else self.buckets.count

    @cached_property
    def slots_used(self) -> int:
        return min(self.slots, self.count)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes that a slot needs, in whole blocks."""
        if self.buckets is None:
            return 0
        return blocks(max(self.buckets.size(0), 1)) * BLOCK

    @cached_property
    def buffer(self) -> dict[str, int]:
        """Which buffer each tensor of `in_place` is."""
        return {tensor.name: index for index, tensor in enumerate(self.in_place)}

    def slot(self, bucket: int) -> int:
        """Which buffer a bucket is in."""
        return len(self.in_place) + bucket % self.slots_used

    @property
    def digests(self) -> int:
        """Which buffer the digests are."""
        return len(self.in_place) + self.slots_used

    @property
    def signals(self) -> int:
        """Which buffer the signals are."""
        return self.digests + (1 if self.digested else 0)

    @cached_property
    def first_block(self) -> dict[str, int]:
        """Where the digests of each tensor that is not empty begin."""
        found, count = {}, 0
        for tensor in self.in_place:
            found[tensor.name] = count
            count += blocks(tensor.nbytes)
        if self.buckets is not None:
            for slot in self.buckets.layout.slots:
                found[slot.tensor.name] = count + slot.offset // BLOCK
        return found

    @cached_property
    def blocks_in_place(self) -> int:
        return sum(blocks(tensor.nbytes) for tensor in self.in_place)

    @cached_property
    def blocks(self) -> int:
        """Digests in all."""
        packed = 0 if self.buckets is None else blocks(self.buckets.layout.nbytes)
        return self.blocks_in_place + packed

    def digests_of(self, bucket: int) -> tuple[int, int]:
        """First digest of a bucket, and how many it has."""
        assert self.buckets is not None
        first = self.blocks_in_place + bucket * (self.bucket_nbytes // BLOCK)
        return first, blocks(self.buckets.size(bucket))

    def number(self, ticket: int, bucket: int) -> int:
        """What stands for a bucket of an attempt in signals and reports.

        The numbers of an attempt rise to its ticket, which comes last and stands for all of it.
        """
        return ticket - self.count + bucket

    def committed(self, ticket: int) -> int:
        """What stands for the commit of an attempt in reports; no attempt's own number."""
        return ticket + 1

    def next_ticket(self, ticket: int) -> int:
        """That of the attempt after one, whose numbers are all its own."""
        return self.committed(ticket) + self.count + 1
