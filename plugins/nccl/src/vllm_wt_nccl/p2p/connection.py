"""A reader's connection to one generation of an owner's memory, and what is read over it in turn."""

from __future__ import annotations

import hmac
import itertools
import secrets
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    CorruptTransfer,
    PeerDead,
    Revoked,
    TransportError,
    WeightTransferError,
    from_text,
)
from vllm_wt_nccl.communicator import Broadcast
from vllm_wt_nccl.p2p import BACKEND, messages
from vllm_wt_nccl.p2p.batching import BUCKET_BYTES, SLOTS, Bucket
from vllm_wt_nccl.p2p.channel import Channel, Garbage
from vllm_wt_nccl.p2p.dialling import dialled
from vllm_wt_nccl.p2p.info import P2pHandle, this_host
from vllm_wt_nccl.p2p.messages import (
    MAX_BYTES,
    NONCE_BYTES,
    Begin,
    Challenge,
    End,
    Fabric,
    Failed,
    Forget,
    Go,
    Hello,
    Key,
    Message,
    Ready,
    Report,
    Sending,
    Status,
    Stop,
    Welcome,
)
from vllm_wt_nccl.p2p.pairs import READER, Pair
from vllm_wt_nccl.p2p.regions import Region
from vllm_wt_nccl.p2p.slots import Moves, Slots, Work, failed
from vllm_wt_nccl.p2p.turns import Turns

_OPEN_POLL_S = 0.0005
_LEAST_S = 0.01
_DRAIN_S = 0.1
"""Seconds that an owner gets to hear that a pass was given up: it looks at least every millisecond, and
a bucket crosses in less, unless it is stopped."""
_NAP_S = 0.00005


class Share:
    """A plan's share of one owner.

    Args:
        connection: To the owner.
        number: By which the owner knows it.
        buckets: What comes.
    """

    def __init__(self, connection: Connection, number: int, buckets: Sequence[Bucket]) -> None:
        self.connection = connection
        self.number = number
        self.buckets = buckets
        self._moves: dict[int, tuple[Moves, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.buckets)

    def slot(self, bucket: int, slots: Slots) -> torch.Tensor:
        """Where a bucket is received."""
        if bucket in self._moves:
            return self._moves[bucket][1]
        return slots.slot(bucket, self.buckets[bucket].nbytes)

    def moves(self, bucket: int, slot: torch.Tensor, region: Region) -> Moves:
        """From a bucket's :meth:`slot` to its places; prepared once."""
        if bucket not in self._moves:
            copies = self.buckets[bucket].copies
            parts = torch.split(slot, [copy.nbytes for copy in copies])
            places = [region.part(copy.target, copy.target_offset, copy.nbytes) for copy in copies]
            self._moves[bucket] = Moves(list(zip(places, parts, strict=True))), slot
        return self._moves[bucket][0]

    def forget(self) -> None:
        """Hold nothing of the region any more."""
        self._moves.clear()


class Part:
    """A pass's share of one owner.

    Args:
        share: What is read.
        region: Where it goes; None once the pass was given up: what still comes is left in its slot.
    """

    def __init__(self, share: Share, region: Region) -> None:
        self.share = share
        self.region: Region | None = region
        self.landed = 0
        """Bytes that are in their places."""
        self.number = 0
        """By which the owner knows the pass; 0 before it was asked for."""
        self.failure: WeightTransferError | None = None
        self.announced = 0
        """Buckets that the owner has begun to send."""
        self.ended: Status | None = None
        self.coming: deque[tuple[int, torch.Tensor, Broadcast]] = deque()
        self.moving: deque[tuple[int, Any]] = deque()
        """Buckets that are being put in their places, and what marks the end of that."""
        self.freed = 0
        """Buckets whose slots are free again."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of it is under way, nor will be."""
        return self.ended is not None and not self.coming and not self.moving

    @property
    def done(self) -> bool:
        return self.is_quiet and self.ended is Status.GOOD and self.failure is None


class Connection:
    """To one generation of an owner's memory.

    Args:
        handle: The owner's, checked.
        device: Of this transport.
        gpu: Its GPU, as a handle has it; nothing for host memory.
        work: What puts buckets in their places.
        turns: Who may receive by NCCL.
    """

    def __init__(
        self, handle: P2pHandle, device: torch.device, gpu: str, work: Work, turns: Turns
    ) -> None:
        self.handle = handle
        # NCCL needs a GPU for each side.
        apart = bool(handle.gpu) and bool(gpu) and handle.gpu != gpu
        self.fabric = Fabric.NCCL if apart else Fabric.GLOO
        self.bucket_nbytes = BUCKET_BYTES[self.fabric]
        self._device = device
        self._work = work
        self._turns = turns
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._channel: Channel | None = None
        self._pair: Pair | None = None
        self._is_ready = False
        self._failure: WeightTransferError | None = None
        self._slots = Slots(self.fabric, device)
        self._plans = itertools.count(1)
        self._passes = itertools.count(1)
        self._parts: deque[Part] = deque()

    # -- connecting ----------------------------------------------------------------------------

    def open(self, reader: str, deadline: Deadline) -> None:
        """Connect, say who is there, and make the pair.

        Args:
            reader: Our name.
            deadline: For all of it.

        Raises:
            PeerDead: The owner is gone.
            Revoked: It doesn't expose the generation any more.
            Timeout, Aborted: It has not answered in time, or the deadline was cancelled.
        """
        ways = self.handle.ways_from(this_host())
        self._channel = Channel(dialled(self.handle.owner, ways, deadline), MAX_BYTES)
        self._reader, self._seconds = reader, max(_LEAST_S, deadline.remaining())
        while not self._is_open():
            deadline.check(
                f"Owner {self.handle.owner!r} has not answered",
                where="open",
                got="no answer: it is stopped, or doesn't poll",
            )
            self.require_up()
            if not self.step():
                deadline.wait(_OPEN_POLL_S)
        self.require_up()

    def _is_open(self) -> bool:
        return self._is_ready and self._pair is not None and self._pair.is_made()

    def _greet(self, challenge: Challenge) -> None:
        hello = Hello(self._nonce, self.handle.generation, self._seconds, self.fabric, self._reader)
        proof = hello.proven(self.handle.secret_bytes, challenge.nonce)
        self._say(replace(hello, proof=proof))

    def _be_welcome(self, welcome: Welcome) -> None:
        proof = Welcome.proven(self.handle.secret_bytes, self._nonce, welcome.status)
        if not hmac.compare_digest(proof, welcome.proof):
            raise Garbage("a welcome of another process")
        if welcome.status != Status.GOOD:
            raise self._revoked("open")
        assert self._channel is not None
        self._pair = Pair(self._channel, READER, self.fabric, self._device, self._seconds)

    # -- reading -------------------------------------------------------------------------------

    def share(self, buckets: Sequence[Bucket]) -> Share:
        """Tell the owner of a plan; forgotten on both sides with the share."""
        share = Share(self, next(self._plans), buckets)
        rows = tuple(
            tuple((copy.source, copy.source_offset, copy.nbytes) for copy in bucket.copies)
            for bucket in buckets
        )
        self._say(messages.Plan(share.number, rows))
        assert self._channel is not None
        weakref.finalize(share, _forget, weakref.ref(self._channel), share.number).atexit = False
        return share

    def begin(self, part: Part) -> None:
        """Have a part read once those before it have ended."""
        self._parts.append(part)
        self.step()

    def give_up(self, part: Part) -> None:
        """Nothing of a part is put in its place any more; what was sent of it is let come."""
        part.region = None
        if part.moving:
            self._work.finish()
        if part not in self._parts:
            return
        if part.number == 0:
            self._parts.remove(part)
        elif part.ended is None and self._failure is None:
            self._say(Stop(part.number))

    def has_drained(self, part: Part) -> bool:
        """Whether nothing of a part that was given up keeps a GPU busy; a moment is waited for that.

        What the owner has announced meanwhile must be received, or its kernel waits on its GPU for
        ours until the next pass, which may be hours. gloo's threads wait and cost nothing.
        """
        if self.fabric is Fabric.GLOO:
            return True
        end = time.monotonic() + _DRAIN_S
        while self._failure is None and part in self._parts:
            if time.monotonic() > end:
                return False
            if not self.step():
                time.sleep(_NAP_S)
        return True

    def report(self, ticket: int) -> None:
        """Tell that all of a ticket is here."""
        self.step()
        self.require_up()
        self._say(Report(ticket))

    def step(self) -> bool:
        """Take in what has come, and go on; whether anything happened. What fails is kept for
        :meth:`require_up`, and for the parts."""
        if self._failure is not None or self._channel is None:
            return False
        try:
            moved = self._step(self._channel)
        except WeightTransferError as error:  # the fabric may know first that the owner has gone
            error.backend = error.backend or BACKEND
            error.where = f"{error.where}, owner {self.handle.owner!r}"
            self._fail(error)
            return True
        except RuntimeError as error:  # torch's: memory that there isn't, a GPU that has failed
            self._fail(failed(error, "read"))
            return True
        except Garbage as error:
            self._fail(
                CorruptTransfer(
                    f"Owner {self.handle.owner!r} says what makes no sense: {error}",
                    backend=BACKEND,
                    where="read",
                    cure="see whether both sides have the same release of vllm-wt-nccl",
                )
            )
            return True
        if self._channel.is_gone:
            self._fail(
                PeerDead(
                    f"Owner {self.handle.owner!r} has gone",
                    backend=BACKEND,
                    where=f"generation {self.handle.generation}",
                    got="its process has ended, or serves us no more",
                    cure="look at the owner's log; connect anew with its newest handle",
                )
            )
        return moved

    def require_up(self) -> None:
        """Raise what has failed, if anything has."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def close(self) -> None:
        """Give everything up; nothing is waited for but copies that are being made."""
        if self._failure is None:
            self._fail(
                TransportError(
                    "The transport is closed", backend=BACKEND, where="read", cure="make a new one"
                )
            )

    def _step(self, channel: Channel) -> bool:
        moved = False
        for message in channel.heard():
            self._obey(message)
            moved = True
        if self._pair is not None:
            self._pair.is_made()
        if self._parts:
            moved |= self._advance(self._parts[0])
        channel.flush()
        return moved

    def _obey(self, message: Message) -> None:
        if isinstance(message, Failed):
            raise from_text(message.text, where=f"owner {self.handle.owner!r}")
        if isinstance(message, Challenge) and self._pair is None:
            self._greet(message)
        elif isinstance(message, Welcome) and self._pair is None:
            self._be_welcome(message)
        elif isinstance(message, Key) and self._pair is not None:
            if not self._pair.take_in(message):
                raise Garbage("a key")
        elif isinstance(message, Ready):
            self._is_ready = True
        elif isinstance(message, Sending | End) and self._parts:
            part = self._parts[0]
            if part.number != message.number or part.ended is not None:
                raise Garbage("a word about another pass")
            if isinstance(message, Sending):
                self._receive(part, message.bucket)
            else:
                self._end(part, message.status)
        else:
            raise Garbage("a message that no owner says now")

    def _receive(self, part: Part, bucket: int) -> None:
        """Receive what the owner begins to send; there is room for it, or it would not."""
        if bucket != part.announced or bucket >= min(len(part.share), part.freed + SLOTS):
            raise Garbage("a bucket that was not asked for")
        assert self._pair is not None
        part.announced += 1
        with self._work.current():  # new memory, too, belongs to a stream
            slot = part.share.slot(bucket, self._slots)
            part.coming.append((bucket, slot, self._pair.receive(slot)))

    def _end(self, part: Part, status: int) -> None:
        if status not in list(Status):
            raise Garbage("the end of a pass")
        part.ended = Status(status)
        if part.ended is Status.GOOD and part.announced < len(part.share):
            raise Garbage("an end before the last bucket")
        if part.ended is Status.REVOKED:
            part.failure = self._revoked("read")

    def _advance(self, part: Part) -> bool:
        """Go on with the first part: it alone is under way."""
        moved = False
        if part.number == 0:
            if self.fabric is Fabric.NCCL and not self._turns.take(self):
                return False
            part.number = next(self._passes)
            until = min(SLOTS, len(part.share))
            self._say(Begin(part.number, part.share.number, until))
            moved = True
        while part.coming and part.coming[0][2].wait(0):
            bucket, slot, _ = part.coming.popleft()
            moved = True
            self._put(part, bucket, slot)
        freed = part.freed
        while part.moving and (part.moving[0][1] is None or part.moving[0][1].query()):
            bucket, _ = part.moving.popleft()
            part.freed += 1
            if part.region is not None:
                part.landed += part.share.buckets[bucket].nbytes
            moved = True
        if part.freed > freed and part.ended is None and freed + SLOTS < len(part.share):
            self._say(Go(part.number, min(len(part.share), part.freed + SLOTS)))
        if part.is_quiet:
            self._parts.popleft()
            self._turns.give_back(self)
            moved = True
        return moved

    def _put(self, part: Part, bucket: int, slot: torch.Tensor) -> None:
        """Put a bucket that has come in its places, unless the pass was given up."""
        mark = None
        if part.region is not None and part.failure is None:
            with self._work.current():
                part.share.moves(bucket, slot, part.region).run()
                mark = self._work.mark()
        part.moving.append((bucket, mark))

    def _fail(self, error: WeightTransferError) -> None:
        self._failure = error
        if any(part.moving for part in self._parts):
            self._work.finish()
        if self._channel is not None:
            self._channel.close()
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.give_up()
        for part in self._parts:
            part.failure = part.failure or error
        self._parts.clear()
        self._turns.give_back(self)

    def _say(self, message: Message) -> None:
        assert self._channel is not None
        self._channel.say(message)
        self._channel.flush()

    def _revoked(self, where: str) -> Revoked:
        return Revoked(
            f"Owner {self.handle.owner!r} doesn't expose this memory any more",
            backend=BACKEND,
            where=where,
            expected=f"generation {self.handle.generation}",
            got="revoked",
            cure="open the owner's new handle",
        )


def _forget(channel: weakref.ref[Channel], number: int) -> None:
    if (there := channel()) is not None:
        there.say(Forget(number))
