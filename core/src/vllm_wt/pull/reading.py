"""One connection of a worker to an owner, and its walk along the itinerary, round after round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK, Digests
from vllm_wt.engine import LoadWeights
from vllm_wt.errors import Aborted, CorruptTransfer
from vllm_wt.info import Handle
from vllm_wt.loading.apply import Kept
from vllm_wt.packing import as_bytes, view_as
from vllm_wt.pull.exposure import DIGESTED, READY, SIGNAL_WORDS
from vllm_wt.pull.itinerary import Batch, Chunk, Itinerary
from vllm_wt.pull.verifying import corrupt
from vllm_wt.transport import Copy, Transport

_SPIN_S = 0.001
"""Seconds that a pass is polled without a pause: on a GPU a short one takes tens of microseconds."""
_POLL_S = 0.0002
"""Seconds between two polls afterwards; an abort ends the wait at once."""
_LOOK_S = 0.0002
"""Seconds between two looks at the owner's signals."""


class _Pass:
    """A plan of the transport's, and what it brings."""

    def __init__(self, transport: Transport, region: Any, copies: Sequence[Copy]) -> None:
        self.plan = transport.prepare(region, copies)
        self.nbytes = sum(copy.nbytes for copy in copies)


class _Part:
    """A pass into the arena, and the digests of what it brings."""

    def __init__(
        self,
        transport: Transport,
        region: Any,
        chunk: Chunk,
        arena: torch.Tensor,
        made: torch.Tensor,
    ) -> None:
        self.read = _Pass(transport, region, chunk.copies)
        self.nbytes = chunk.nbytes
        self._digests = Digests([arena[chunk.start : chunk.end]])
        self._made = made[chunk.start // BLOCK : chunk.end // BLOCK]

    def digest(self) -> None:
        self._digests.run(self._made)


class Reading:
    """A live transport with the arena registered, the owner open and what to read prepared.

    Args:
        transport: New; this does not close it when it raises.
        itinerary: What to read.
        arena: Zeros, uint8, of the itinerary's size.
        handle: Of the owner.
        backend: Named in errors.
        counted: Whether the bytes that a pass says it has brought are held against what it should.
        deadline: For connecting.
    """

    def __init__(
        self,
        transport: Transport,
        itinerary: Itinerary,
        arena: torch.Tensor,
        handle: Handle,
        *,
        backend: str,
        counted: bool,
        deadline: Deadline,
    ) -> None:
        self._transport = transport
        self._itinerary = itinerary
        self._arena = arena
        self._owner = handle.owner
        self._counted = counted
        self._stuck: Any = None
        self._done = 0
        """Bytes of tensors that this round has brought."""
        exposure = itinerary.exposure
        device = arena.device
        self._signals = torch.zeros(SIGNAL_WORDS, dtype=torch.int64, device=device)
        self._digests = torch.zeros(max(1, exposure.blocks), dtype=torch.int64, device=device)
        self._made = torch.zeros(arena.numel() // BLOCK, dtype=torch.int64, device=device)
        # Apart from the default stream, which waits for what the model does and holds it up.
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        region = transport.register([arena, as_bytes(self._digests), as_bytes(self._signals)])
        body = handle.unwrap(backend=backend)
        transport.open(handle.owner, handle.generation, body, deadline)

        def prepared(copies: Sequence[Copy]) -> _Pass | None:
            return _Pass(transport, region, copies) if copies else None

        signalled = exposure.digested or exposure.count
        self._look = prepared(itinerary.signals() if signalled else [])
        self._in_place = prepared(itinerary.digests_in_place())
        self._batches = [
            _Prepared(
                batch,
                [
                    (
                        stop.bucket,
                        [_Part(transport, region, c, arena, self._made) for c in stop.chunks],
                    )
                    for stop in batch.stops
                ],
                Kept(_views(batch, arena)),
                batch.expected.to(device),
                list(_tails(batch, arena)) if len(itinerary.batches) > 1 else [],
            )
            for batch in itinerary.batches
        ]

    def run(self, ticket: int, load_weights: LoadWeights, deadline: Deadline) -> None:
        """Read everything of an attempt, hand it over and report it.

        Raises:
            CorruptTransfer: What came is not what the owner has.
            Timeout, Aborted: The deadline has passed, or was cancelled.
            WeightTransferError: Of the transport, or of ``load_weights``.
        """
        self._done = 0
        with ExitStack() as stack:
            pool: Executor | None = None
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            elif self._itinerary.exposure.digested:
                pool = stack.enter_context(ThreadPoolExecutor(1, "vllm-wt-verify"))
            walk = _Walk(self, ticket, deadline, pool)
            for prepared in self._batches:
                walk.receive(prepared)
                load_weights(prepared.weights)
            walk.end()

    def close(self) -> bool:
        """Release everything, unless a pass that could not be stopped is still under way; whether
        nothing will write into the arena any more."""
        if self._stuck is not None and not self._transport.cancel(self._stuck):
            return False
        self._stuck = None
        self._transport.close()
        return True

    def make(self, read: _Pass, deadline: Deadline) -> None:
        """Make one pass."""
        operation = self._transport.submit(read.plan)
        began = time.monotonic()
        try:
            while not (progress := self._transport.poll(operation)).done:
                deadline.check(
                    "The trainer's memory was not read in time",
                    where="receive_weights",
                    got=f"{self._done + progress.nbytes} of {self._itinerary.nbytes} bytes",
                )
                if time.monotonic() - began > _SPIN_S:
                    deadline.wait(_POLL_S)
        except BaseException:
            if not self._transport.cancel(operation):
                self._stuck = operation
            raise
        if self._counted and progress.nbytes != read.nbytes:
            raise CorruptTransfer(
                "The fabric has read less than it was asked to, and calls it done",
                where="receive_weights",
                expected=f"{read.nbytes} bytes",
                got=f"{progress.nbytes} bytes",
                cure="push again; if it stays, report it to the authors of the backend",
            )


@dataclass(frozen=True)
class _Prepared:
    """A batch with its passes.

    Args:
        batch: Of the itinerary.
        stops: For each of its stops, the bucket and what is read.
        weights: Its tensors, in the arena.
        expected: Which of the owner's digests belong to the blocks of the arena.
        tails: The parts of the arena that must be zero before it is read into.
    """

    batch: Batch
    stops: list[tuple[int | None, list[_Part]]]
    weights: Kept
    expected: torch.Tensor
    tails: list[torch.Tensor]


class _Walk:
    """One round of a `Reading`."""

    def __init__(
        self, reading: Reading, ticket: int, deadline: Deadline, pool: Executor | None
    ) -> None:
        self._reading = reading
        self._exposure = reading._itinerary.exposure
        self._ticket = ticket
        self._deadline = deadline
        self._pool = pool
        self._left = 0
        """Buckets that are done with."""
        self._seen = [0] * SIGNAL_WORDS
        self._digests_in_place = False

    def receive(self, prepared: _Prepared) -> None:
        """Bring a batch into the arena, verified."""
        if prepared.tails:
            torch._foreach_zero_(prepared.tails)
        made: list[Future[None]] = []
        for bucket, parts in prepared.stops:
            if bucket is not None:
                self._leave(bucket)
                self._await(READY, self._exposure.number(self._ticket, bucket))
            for part in parts:
                self._reading.make(part.read, self._deadline)
                self._reading._done += part.nbytes
                if self._pool is not None:
                    made.append(self._pool.submit(part.digest))
                elif self._exposure.digested:
                    part.digest()
            if bucket is not None:
                self._require_kept(bucket)
        for future in made:
            future.result()
        if self._exposure.digested:
            self._verify(prepared)

    def _require_kept(self, bucket: int) -> None:
        """What was read was in its slot all the time: the owner waits for the readers it knows of."""
        look = self._reading._look
        if not self._exposure.digested and look is not None:  # where nothing else would see it
            self._reading.make(look, self._deadline)
        self._take_signals()
        following = bucket + self._exposure.slots_used
        if self._seen[READY] >= self._exposure.number(self._ticket, following):
            raise CorruptTransfer(
                "The trainer has used a bucket again before this worker had read it",
                where=f"bucket {bucket} of {self._exposure.count}",
                expected="a trainer that waits for all workers",
                got="one that knows of fewer",
                cure="let the client's world_size() tell all workers of the engine",
            )

    def end(self) -> None:
        """Report all of it."""
        self._leave(self._exposure.count)
        self._reading._transport.notify(self._reading._owner, self._ticket)

    def _leave(self, bucket: int) -> None:
        """Let the owner have the slots of all buckets before this one."""
        while self._left < bucket:
            number = self._exposure.number(self._ticket, self._left)
            # In step with the owner, which remembers a few reports only.
            self._await(READY, number)
            self._reading._transport.notify(self._reading._owner, number)
            self._left += 1

    def _await(self, signal: int, number: int) -> None:
        look = self._reading._look
        assert look is not None
        while self._seen[signal] < number:
            self._reading.make(look, self._deadline)
            self._take_signals()
            if self._seen[signal] >= number:
                return
            self._deadline.check(
                "The trainer has not made the weights readable in time",
                where="receive_weights",
                got="a trainer that still gathers, or has stopped",
            )
            self._deadline.wait(_LOOK_S)

    def _take_signals(self) -> None:
        self._seen = self._reading._signals.tolist()
        if max(self._seen) > self._ticket:
            raise Aborted(
                "The trainer has begun another attempt meanwhile",
                where="receive_weights",
                expected=f"attempt {self._ticket}",
                got=f"attempt {max(self._seen)} or later",
                cure="let one push at a time run",
            )

    def _verify(self, prepared: _Prepared) -> None:
        if any(bucket is None for bucket, _ in prepared.stops) and not self._digests_in_place:
            self._await(DIGESTED, self._ticket)
            if self._reading._in_place is not None:
                self._reading.make(self._reading._in_place, self._deadline)
            self._digests_in_place = True
        made = self._reading._made[: len(prepared.expected)]
        expected = self._reading._digests.index_select(0, prepared.expected)
        if torch.equal(made, expected):
            return
        layout = prepared.batch.layout
        names = [slot.tensor.name for slot in layout.slots if slot.nbytes]
        raise corrupt(made, expected, names, self._reading._itinerary.slices.runs)


def _views(batch: Batch, arena: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    slots = {slot.tensor.name: slot for slot in batch.layout.slots}
    for name in batch.names:
        slot = slots[name]
        yield name, view_as(arena[slot.offset : slot.offset + slot.nbytes], slot.tensor)


def _tails(batch: Batch, arena: torch.Tensor) -> Iterator[torch.Tensor]:
    """What is behind each tensor in its last block."""
    for slot in batch.layout.slots:
        if tail := -slot.nbytes % BLOCK:
            end = slot.offset + slot.nbytes
            yield arena[end : end + tail]
