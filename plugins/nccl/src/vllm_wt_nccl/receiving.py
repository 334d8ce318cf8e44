"""A worker's walk through the buckets: each is verified, and what is needed of it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from vllm_wt.pull.exposure import WORD, Exposure
from vllm_wt_nccl.communicator import Broadcast, Communicator

_LOOK_S = 0.02
"""Seconds between two looks at whether the round has been given up, or has failed elsewhere."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class _Bucket:
    """One broadcast.

    Args:
        slot: Where it comes.
        digests: Where the digests of its blocks come, if they do; int64.
        made: How those are made here.
        steps: What is then done: copies into the arena, and what is complete with them.
    """

    slot: torch.Tensor
    digests: torch.Tensor | None
    made: Digests | None
    steps: list[Copies | Kept] = field(default_factory=list)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self.slot, *([] if self.digests is None else [as_bytes(self.digests)])]


class Receiving:
    """Prepared once, walked in each round.

    Args:
        buckets: How the trainer sends.
        reception: What this worker needs of it.
        arena: Uint8, of `arena_nbytes` at least.
        device: Where buckets come.
    """

    def __init__(
        self, buckets: Exposure, reception: Reception, arena: torch.Tensor, device: torch.device
    ) -> None:
        self._exposure = buckets
        self._arena = arena
        count = buckets.slots_used
        whole = is_whole(reception, buckets)
        self._slots = [] if whole else zeros(count, buckets.slot_nbytes, device)
        self._digests = zeros(count, buckets.slot_nbytes // BLOCK * WORD, device)
        self._made = torch.zeros(
            max(1, buckets.slot_nbytes // BLOCK), dtype=torch.int64, device=device
        )
        self._buckets = [self._bucket(number) for number in range(buckets.count)]
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
        coming: list[list[Broadcast]] = []

        def start(number: int) -> None:
            if communicator is not None and number < len(self._buckets):
                seconds = deadline.remaining()
                buffers = self._buckets[number].buffers
                coming.append([communicator.broadcast(each, seconds) for each in buffers])

        for number in range(self._exposure.slots_used):
            start(number)
        for weights in self._empty:
            load_weights(weights)
        for number, bucket in enumerate(self._buckets):
            self._await(coming[number], number, deadline, watch)
            coming[number] = []
            self._verify(number, bucket)
            for step in bucket.steps:
                if isinstance(step, Copies):
                    step.run()
                else:
                    load_weights(step)
            start(number + self._exposure.slots_used)

    def _await(
        self,
        coming: Sequence[Broadcast],
        number: int,
        deadline: Deadline,
        watch: Callable[[], None],
    ) -> None:
        for broadcast in coming:
            while not broadcast.wait(min(_LOOK_S, deadline.remaining())):
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
            f"Tensor {self._tensor_at(number, block)!r} did not arrive as the trainer has it",
            where="verify",
            expected=f"digest {int(bucket.digests[block]) % 2**64:016x} of block {block}",
            got=f"digest {int(made[block]) % 2**64:016x}",
            cure="push again; if it stays, look for a broken fabric",
        )

    def _tensor_at(self, number: int, block: int) -> str:
        assert self._exposure.buckets is not None
        at = number * self._exposure.bucket_nbytes + block * BLOCK
        found = ""
        for slot in self._exposure.buckets.layout.slots:
            if slot.offset > at:
                break
            found = slot.tensor.name
        return found

    def _bucket(self, number: int) -> _Bucket:
        turn = number % self._exposure.slots_used
        _, count = self._exposure.digests_of(number)
        if self._slots:
            slot = self._slots[turn][: count * BLOCK]
        else:
            slot = self._arena.narrow(0, number * self._exposure.bucket_nbytes, count * BLOCK)
        if not self._exposure.digested:
            return _Bucket(slot, None, None)
        return _Bucket(slot, self._digests[turn].view(torch.int64)[:count], Digests([slot]))

    def _take_in_place(self, reception: Reception) -> None:
        """All buckets have come into the arena, one behind the other, and stay there."""
        buckets = self._exposure.buckets
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
                self._buckets[bucket].steps.append(Copies(each))
            last = max([last, *pairs])
            complete = self._empty if last < 0 else self._buckets[last].steps
            complete.append(Kept(layout.views(self._arena)))

    def _pieces(
        self, reception: Reception, name: str, place: torch.Tensor
    ) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """What of a tensor comes with which bucket: to, and from."""
        if not place.numel():
            return
        assert self._exposure.buckets is not None
        pieces = self._exposure.buckets.pieces(name)
        at = 0
        for offset, nbytes in reception.slices.runs[name]:
            for piece in pieces:
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


def is_whole(reception: Reception, buckets: Exposure) -> bool:
    """Whether all of every tensor is needed, and stays until the commit: it comes where it stays."""
    needed = reception.slices.plan.manifest.nbytes
    stays = reception.intake.batches is None
    return stays and needed == buckets.manifest.nbytes


def arena_nbytes(reception: Reception, buckets: Exposure) -> int:
    """Bytes of the arena."""
    if is_whole(reception, buckets):
        return max(1, buckets.blocks * BLOCK)
    return max((layout.nbytes for layout in layouts(reception)), default=1)


def zeros(count: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
