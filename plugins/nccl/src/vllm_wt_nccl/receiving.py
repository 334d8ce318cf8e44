"""A worker's walk through the buckets: each is verified, and what is needed of it is kept."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK, Digests
from vllm_wt.engine import LoadWeights
from vllm_wt.errors import CorruptTransfer
from vllm_wt.loading.apply import Kept
from vllm_wt.loading.reception import Reception
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Copies, Layout, as_bytes, view_as
from vllm_wt.pull.exposure import WORD
from vllm_wt_nccl.communicator import Broadcast, Communicator
from vllm_wt_nccl.schedule import Schedule

_LOOK_S = 0.02
"""Seconds between two looks at whether the round has been given up, or has failed elsewhere."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class _Bucket:
    """What one broadcast brings.

    Args:
        slot: Where it comes.
        digests: Where the digests of its blocks come, if they do; int64.
        made: How those are made here.
        steps: What is then done: copies into the arena, and what is complete with them.
    """

    slot: torch.Tensor
    digests: torch.Tensor | None
    made: Digests | None
    steps: list[Copies | Kept | Callable[[], None]] = field(default_factory=list)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.slot, *([] if self.digests is None else [as_bytes(self.digests)])]


class _Late:
    """Copies out of a bucket that can be done only when its buffer has another one.

    Args:
        slot: The buffer.
        pairs: To, and from: views of it.
    """

    def __init__(self, slot: torch.Tensor, pairs: Pairs) -> None:
        self._slot = slot
        first = slot.storage_offset()
        self._places = [
            (to, source.storage_offset() - first, source.numel()) for to, source in pairs
        ]
        self._kept: torch.Tensor | None = None

    def keep(self) -> None:
        self._kept = self._slot.clone()

    def copy(self) -> None:
        kept, self._kept = self._kept, None
        assert kept is not None
        Copies((to, kept[at : at + count]) for to, at, count in self._places).run()


class Receiving:
    """Prepared once, walked in each round.

    Args:
        schedule: How the trainer's ranks send.
        reception: What this worker needs of it.
        arena: Uint8, of `arena_nbytes` at least.
        device: Where buckets come.
    """

    def __init__(
        self, schedule: Schedule, reception: Reception, arena: torch.Tensor, device: torch.device
    ) -> None:
        self._schedule = schedule
        self._arena = arena
        count = schedule.slots_used
        whole = is_whole(reception, schedule)
        self._slots = [] if whole else zeros(count, schedule.slot_nbytes, device)
        self._digests = zeros(count, schedule.slot_nbytes // BLOCK * WORD, device)
        self._made = torch.zeros(
            max(1, schedule.slot_nbytes // BLOCK), dtype=torch.int64, device=device
        )
        self._buckets = [self._bucket(number) for number in range(schedule.count)]
        self._empty: list[Kept] = []
        """What is complete before anything has come."""
        if whole:
            self._take_in_place(reception)
        else:
            self._take_out(reception)

    @property
    def count(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def run(
        self,
        communicator: Communicator | None,
        load_weights: LoadWeights,
        deadline: Deadline,
        watch: Callable[[], None],
    ) -> None:
        """Receive everything and hand it over.

        Args:
            communicator: To the trainer; None where there is nothing to send.
            load_weights: Core's.
            deadline: Of the round.
            watch: Called now and then while this waits; raises when the round has failed.

        Raises:
            CorruptTransfer: What came is not what the trainer had.
            WeightTransferError: Of the fabric, the deadline, ``watch`` or ``load_weights``.
        """
        coming: dict[int, Broadcast] = {}

        def start(number: int) -> None:
            if communicator is not None and number < len(self._buckets):
                seconds, root = deadline.remaining(), self._schedule.turns[number].sender
                buffers = self._buckets[number].buffers
                coming[number] = communicator.broadcast(buffers, seconds, root)

        for number in range(self._schedule.slots_used):
            start(number)
        for weights in self._empty:
            load_weights(weights)
        for number, bucket in enumerate(self._buckets):
            self._await(coming.pop(number), number, deadline, watch)
            self._verify(number, bucket)
            for step in bucket.steps:
                if isinstance(step, Copies):
                    step.run()
                elif isinstance(step, Kept):
                    load_weights(step)
                else:
                    step()
            start(number + self._schedule.slots_used)

    def _await(
        self,
        coming: Broadcast,
        number: int,
        deadline: Deadline,
        watch: Callable[[], None],
    ) -> None:
        while not coming.wait(min(_LOOK_S, deadline.remaining())):
            deadline.check(
                "Not all weights have come in time",
                where="receive_weights",
                got=f"{number} of {len(self._buckets)} buckets",
            )
            watch()

    def _verify(self, number: int, bucket: _Bucket) -> None:
        if bucket.made is None or bucket.digests is None:
            return
        made = self._made[: bucket.made.count]
        bucket.made.run(made)
        if torch.equal(made, bucket.digests):
            return
        block = int((made != bucket.digests).nonzero()[0])
        raise CorruptTransfer(
            f"Tensor {self._schedule.name_at(number, block)!r} did not arrive as the trainer has it",
            where="verify",
            expected=f"digest {int(bucket.digests[block]) % 2**64:016x} of block {block}",
            got=f"digest {int(made[block]) % 2**64:016x}",
            cure="push again; if it stays, look for a broken fabric",
        )

    def _bucket(self, number: int) -> _Bucket:
        turn = number % self._schedule.slots_used
        count = self._schedule.blocks(number)
        if self._slots:
            slot = self._slots[turn][: count * BLOCK]
        else:
            (stream,) = self._schedule.streams
            slot = self._arena.narrow(0, number * stream.bucket_nbytes, count * BLOCK)
        if not self._schedule.digested:
            return _Bucket(slot, None, None)
        return _Bucket(slot, self._digests[turn].view(torch.int64)[:count], Digests([slot]))

    def _take_in_place(self, reception: Reception) -> None:
        """All buckets have come into the arena, one behind the other, and stay there."""
        (stream,) = self._schedule.streams
        buckets = stream.buckets
        views = {} if buckets is None else dict(buckets.layout.views(self._arena))
        for tensor in reception.slices.plan.manifest.tensors:
            if not tensor.nbytes:
                views[tensor.name] = view_as(self._arena[:0], tensor)
        names = [tensor.name for tensor in reception.slices.plan.manifest.tensors]
        weights = Kept((name, views[name]) for name in names)
        (self._buckets[-1].steps if self._buckets else self._empty).append(weights)

    def _take_out(self, reception: Reception) -> None:
        """What is needed of each bucket goes to the arena. There a part takes the place of the one
        before, once that is complete and handed over."""
        last = -1
        for layout in layouts(reception):
            pairs: dict[int, Pairs] = {}
            for slot in layout.slots:
                place = self._arena[slot.offset : slot.offset + slot.nbytes]
                for bucket, pair in self._pieces(reception, slot.tensor.name, place):
                    pairs.setdefault(bucket, []).append(pair)
            for bucket, each in pairs.items():
                if bucket < last:  # of several senders', while the part before still has its place
                    self._put_off(self._buckets[bucket], self._buckets[last], each)
                else:
                    self._buckets[bucket].steps.append(Copies(each))
            last = max([last, *pairs])
            complete = self._empty if last < 0 else self._buckets[last].steps
            complete.append(Kept(layout.views(self._arena)))

    def _put_off(self, bucket: _Bucket, until: _Bucket, pairs: Pairs) -> None:
        """Keep what has come until the place of it is free, behind the last step of another bucket."""
        late = _Late(bucket.slot, pairs)
        bucket.steps.append(late.keep)
        until.steps.append(late.copy)

    def _pieces(
        self, reception: Reception, name: str, place: torch.Tensor
    ) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """What of a tensor comes with which bucket: to, and from."""
        if not place.numel():
            return
        pieces = self._schedule.pieces(name)
        starts = [piece.tensor_offset for piece in pieces]
        at = 0
        for offset, nbytes in reception.slices.runs[name]:
            first = bisect_right(starts, offset) - 1
            last = bisect_left(starts, offset + nbytes)
            for piece in pieces[first:last]:
                start = max(offset, piece.tensor_offset)
                end = min(offset + nbytes, piece.tensor_offset + piece.nbytes)
                if start < end:
                    source = piece.offset + start - piece.tensor_offset
                    to = at + start - offset
                    slot = self._buckets[piece.bucket].slot
                    count = end - start
                    yield piece.bucket, (place[to : to + count], slot[source : source + count])
            at += nbytes


def layouts(reception: Reception) -> list[Layout]:
    """Where each part lies in the arena."""
    tensors = {tensor.name: tensor for tensor in reception.slices.plan.manifest.tensors}
    return [Layout(Manifest(tuple(map(tensors.__getitem__, part)))) for part in reception.parts]


def is_whole(reception: Reception, schedule: Schedule) -> bool:
    """Whether all of every tensor is needed from one sender, and stays until the commit: it comes where
    it stays."""
    needed = reception.slices.plan.manifest.nbytes
    stays = reception.intake.batches is None
    return stays and needed == schedule.cuts.manifest.nbytes and len(schedule.streams) == 1


def arena_nbytes(reception: Reception, schedule: Schedule) -> int:
    """Bytes of the arena."""
    if is_whole(reception, schedule):
        (stream,) = schedule.streams
        return max(1, stream.blocks * BLOCK)
    return max((layout.nbytes for layout in layouts(reception)), default=1)


def zeros(count: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
