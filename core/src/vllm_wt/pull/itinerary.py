"""What a worker reads, in which order, and where it goes: made once, walked every round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_wt.digests import BLOCK, blocks
from vllm_wt.loading.slices import Slices
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Layout
from vllm_wt.pull.exposure import SIGNAL_WORDS, WORD, Exposure
from vllm_wt.pull.verifying import expected_blocks
from vllm_wt.transport import Copy

ARENA, DIGESTS, SIGNALS = 0, 1, 2
"""The worker's buffers."""


@dataclass(frozen=True)
class Chunk:
    """Copies that one pass makes, and the part of the arena that they fill.

    Args:
        copies: To be made together.
        start: First byte of the part.
        end: Byte after its last; both on the edge of a block.
    """

    copies: tuple[Copy, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that come into the arena."""
        return sum(copy.nbytes for copy in self.copies if copy.target == ARENA)


@dataclass(frozen=True)
class Stop:
    """What is read of one bucket, or of all that is read in place where ``bucket`` is None."""

    bucket: int | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Batch:
    """Tensors that are in the arena at the same time.

    Args:
        names: Of them, in the manifest's order.
        layout: Where they lie in it: those that are read in place come first.
        stops: What is read for them, in order.
        expected: For each block of the arena, which of the owner's digests is its.
    """

    names: tuple[str, ...]
    layout: Layout
    stops: tuple[Stop, ...]
    expected: torch.Tensor


class Itinerary:
    """The way of one worker through what an owner exposes.

    Args:
        exposure: The owner's buffers.
        slices: What the worker needs of its tensors.
        batches: Names of the tensors that are in the arena at the same time.
        owner: Name of the owner.
        chunk_nbytes: Most bytes of one pass.
        most: Most copies of one pass.
        alignment: Of the transport.
    """

    def __init__(
        self,
        exposure: Exposure,
        slices: Slices,
        batches: Sequence[Sequence[str]],
        *,
        owner: str,
        chunk_nbytes: int,
        most: int,
        alignment: int,
    ) -> None:
        self.exposure = exposure
        self.slices = slices
        self._owner = owner
        self._chunk_nbytes = max(BLOCK, chunk_nbytes // BLOCK * BLOCK)
        self._most = most
        self._alignment = alignment
        self._tensors = {tensor.name: tensor for tensor in slices.plan.manifest.tensors}
        self.batches = tuple(self._batch(names) for names in batches)

    @cached_property
    def arena_nbytes(self) -> int:
        """Bytes of the arena, whole blocks."""
        return max(blocks(batch.layout.nbytes) * BLOCK for batch in self.batches)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are read for the tensors."""
        return sum(
            chunk.nbytes for batch in self.batches for stop in batch.stops for chunk in stop.chunks
        )

    def digests_in_place(self) -> list[Copy]:
        return self._digests(0, self.exposure.blocks_in_place)

    def signals(self) -> list[Copy]:
        return [Copy(self._owner, self.exposure.signals, 0, SIGNALS, 0, WORD * SIGNAL_WORDS)]

    def _digests(self, first: int, count: int) -> list[Copy]:
        if not self.exposure.digested or not count:
            return []
        start = first * WORD // self._alignment * self._alignment
        nbytes = (first + count) * WORD - start
        return [Copy(self._owner, self.exposure.digests, start, DIGESTS, start, nbytes)]

    def _batch(self, names: Sequence[str]) -> Batch:
        order = sorted(names, key=self.exposure.packed.__contains__)
        layout = Layout(Manifest(tuple(map(self._tensors.__getitem__, order))), alignment=BLOCK)
        stops = []
        in_place = tuple(self._chunks(self._read_in_place(layout)))
        if in_place:
            stops.append(Stop(None, in_place))
        by_bucket: dict[int, list[Copy]] = {}
        for bucket, copy in self._read_packed(layout):
            by_bucket.setdefault(bucket, []).append(copy)
        for bucket, copies in sorted(by_bucket.items()):
            chunks = list(self._chunks(_joined(copies)))
            # With the last of a bucket come its digests, and a look at which others are ready.
            with_it = self._digests(*self.exposure.digests_of(bucket)) + self.signals()
            if len(chunks[-1].copies) + len(with_it) <= self._most:
                chunks[-1] = replace(chunks[-1], copies=(*chunks[-1].copies, *with_it))
            else:
                chunks += [Chunk((copy,), chunks[-1].end, chunks[-1].end) for copy in with_it]
            stops.append(Stop(bucket, tuple(chunks)))
        return Batch(tuple(names), layout, tuple(stops), self._expected(layout))

    def _expected(self, layout: Layout) -> torch.Tensor:
        """One index a block; every block of the arena belongs to a tensor."""
        if not self.exposure.digested:
            return torch.empty(0, dtype=torch.int64)
        names = (slot.tensor.name for slot in layout.slots)
        return expected_blocks(self.exposure, names, self.slices.runs)

    def _read_in_place(self, layout: Layout) -> Iterator[Copy]:
        for slot in layout.slots:
            source = self.exposure.buffer.get(slot.tensor.name)
            if source is None:
                continue
            target = slot.offset
            for offset, nbytes in self.slices.runs[slot.tensor.name]:
                yield Copy(self._owner, source, offset, ARENA, target, nbytes)
                target += nbytes

    def _read_packed(self, layout: Layout) -> Iterator[tuple[int, Copy]]:
        buckets = self.exposure.buckets
        if buckets is None:
            return
        for slot in layout.slots:
            if not slot.nbytes or slot.tensor.name not in self.exposure.packed:
                continue
            pieces = buckets.pieces(slot.tensor.name)
            target = slot.offset
            for offset, nbytes in self.slices.runs[slot.tensor.name]:
                for piece in pieces:
                    start = max(offset, piece.tensor_offset)
                    end = min(offset + nbytes, piece.tensor_offset + piece.nbytes)
                    if start >= end:
                        continue
                    copy = Copy(
                        self._owner,
                        self.exposure.slot(piece.bucket),
                        piece.offset + start - piece.tensor_offset,
                        ARENA,
                        target + start - offset,
                        end - start,
                    )
                    yield piece.bucket, self._in_blocks(copy)
                target += nbytes

    def _in_blocks(self, copy: Copy) -> Copy:
        """With the padding behind a tensor's end, which both sides have: so neighbours become one."""
        if not self.exposure.digested:
            return copy
        return replace(copy, nbytes=blocks(copy.nbytes) * BLOCK)

    def _chunks(self, copies: Iterable[Copy]) -> Iterator[Chunk]:
        """Copies whose targets follow each other, as passes of limited size."""
        group: list[Copy] = []
        nbytes = 0
        for copy in _cut(copies, self._chunk_nbytes):
            if group and (nbytes + copy.nbytes > self._chunk_nbytes or len(group) == self._most):
                yield _chunk(group)
                group, nbytes = [], 0
            group.append(copy)
            nbytes += copy.nbytes
        if group:
            yield _chunk(group)


def _chunk(copies: list[Copy]) -> Chunk:
    end = copies[-1].target_offset + copies[-1].nbytes
    return Chunk(tuple(copies), copies[0].target_offset // BLOCK * BLOCK, blocks(end) * BLOCK)


def _cut(copies: Iterable[Copy], most: int) -> Iterator[Copy]:
    """The same copies, none longer than ``most``."""
    for copy in copies:
        for done in range(0, copy.nbytes, most):
            yield replace(
                copy,
                source_offset=copy.source_offset + done,
                target_offset=copy.target_offset + done,
                nbytes=min(most, copy.nbytes - done),
            )


def _joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Neighbours on both sides as one."""
    last: Copy | None = None
    for copy in copies:
        if (
            last is not None
            and last.source == copy.source
            and last.source_offset + last.nbytes == copy.source_offset
            and last.target_offset + last.nbytes == copy.target_offset
        ):
            last = replace(last, nbytes=last.nbytes + copy.nbytes)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last
