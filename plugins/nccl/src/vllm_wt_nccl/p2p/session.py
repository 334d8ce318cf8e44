"""One reader, as an owner serves it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_wt.errors import ManifestMismatch, WeightTransferError, to_text
from vllm_wt_nccl.communicator import Broadcast
from vllm_wt_nccl.p2p import messages
from vllm_wt_nccl.p2p.batching import SLOTS
from vllm_wt_nccl.p2p.channel import Channel, Garbage
from vllm_wt_nccl.p2p.exposures import Exposure, Exposures
from vllm_wt_nccl.p2p.messages import (
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
    Row,
    Sending,
    Status,
    Stop,
    Welcome,
)
from vllm_wt_nccl.p2p.pairs import OWNER, Pair
from vllm_wt_nccl.p2p.regions import Region
from vllm_wt_nccl.p2p.slots import Moves, Slots, Work
from vllm_wt_nccl.p2p.tickets import Tickets
from vllm_wt_nccl.p2p.turns import Turns

_MOST_PLANS = 1 << 12
_MOST_PASSES = 64
"""That a reader has at a time."""


class _Planned:
    """A plan of the reader's, with its copies into the slots, prepared when they are needed first."""

    def __init__(self, buckets: Sequence[Sequence[Row]]) -> None:
        self.buckets = buckets
        self._moves: dict[int, tuple[Moves, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.buckets)

    def pack(self, bucket: int, region: Region, slots: Slots) -> torch.Tensor:
        """Copy a bucket into its slot.

        Raises:
            ManifestMismatch: Memory of the region has gone.
        """
        if bucket not in self._moves:
            rows = self.buckets[bucket]
            slot = slots.slot(bucket, sum(nbytes for _, _, nbytes in rows))
            parts = torch.split(slot, [nbytes for _, _, nbytes in rows])
            pairs = [(to, region.part(*row)) for to, row in zip(parts, rows, strict=True)]
            self._moves[bucket] = Moves(pairs), slot
        moves, slot = self._moves[bucket]
        moves.run()
        return slot

    def forget(self) -> None:
        """Hold nothing of the region any more."""
        self._moves.clear()


@dataclass(eq=False)
class _Pass:
    """One pass of the reader; ``until`` says how many buckets it has room for."""

    number: int
    plan: _Planned
    until: int
    sent: int = 0
    is_stopped: bool = False


@dataclass(eq=False)
class _Sent:
    """A bucket that is under way, and which slot it is in."""

    slot: int
    broadcast: Broadcast


@dataclass(eq=False)
class Served:
    """What the sessions of an owner share.

    Args:
        device: Of the transport.
        exposures: What may be read.
        tickets: What readers have reported.
    """

    device: torch.device
    exposures: Exposures
    tickets: Tickets
    work: Work = field(init=False)
    turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        self.work = Work(self.device)


class Session:
    """One connection, from a stranger's to a reader's.

    Args:
        channel: To whoever has connected.
        served: What all sessions share.
    """

    def __init__(self, channel: Channel, served: Served) -> None:
        self.channel = channel
        self.exposure: Exposure | None = None
        self._served = served
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._name = ""
        self._fabric = Fabric.GLOO
        self._pair: Pair | None = None
        self._is_ready = False
        self._slots: Slots | None = None
        self._plans: dict[int, _Planned] = {}
        self._passes: deque[_Pass] = deque()
        self._sending: deque[_Sent] = deque()
        channel.say(Challenge(self._challenge))

    @property
    def is_stranger(self) -> bool:
        """Whether it has not shown that it knows of any memory."""
        return self.exposure is None

    def step(self) -> bool:
        """Take in what has come, answer what can be answered; whether there was anything.

        Raises:
            Garbage: The reader says what makes no sense.
            WeightTransferError: It can't be served any more.
        """
        moved = False
        for message in self.channel.heard():
            self._obey(message)
            moved = True
        if self._pair is not None and not self.channel.is_gone:
            moved |= self._advance(self._pair)
        self.channel.flush()
        return moved

    def revoked(self) -> None:
        """Hold nothing of the region any more; its readers are told in the next step."""
        for plan in self._plans.values():
            plan.forget()
        for one in self._passes:
            one.plan.forget()

    def fail(self, error: WeightTransferError) -> None:
        """Tell the reader why it is not served any more; to be closed then."""
        self.channel.say(Failed(to_text(error)))
        self.channel.flush()

    def close(self) -> None:
        self.channel.close()
        self.revoked()
        self._passes.clear()
        self._served.turns.give_back(self)
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.give_up()

    def _obey(self, message: Message) -> None:
        if self.is_stranger:
            if not isinstance(message, Hello):
                raise Garbage("a stranger's message")
            self._greet(message)
        elif isinstance(message, Key) and self._pair is not None:
            _require(self._pair.take_in(message), "a key")
        elif isinstance(message, messages.Plan):
            self._note(message)
        elif isinstance(message, Forget):
            self._plans.pop(message.number, None)
        elif isinstance(message, Begin):
            plan = self._plans.get(message.plan)
            _require(plan is not None and len(self._passes) < _MOST_PASSES, "a pass")
            assert plan is not None
            self._passes.append(_Pass(message.number, plan, message.until))
        elif isinstance(message, Go | Stop):
            # It may have ended meanwhile.
            for one in [one for one in self._passes if one.number == message.number]:
                if isinstance(message, Stop):
                    one.is_stopped = True
                else:
                    one.until = max(one.until, message.until)
        elif isinstance(message, Report):
            self._served.tickets.add(self._name, message.ticket)
        else:
            raise Garbage("a message that no reader says")

    def _greet(self, hello: Hello) -> None:
        exposure = self._served.exposures.find(hello, self._challenge)
        if exposure is None:
            raise Garbage("a reader without a proof")
        self.channel.most = messages.MAX_BYTES
        self.exposure, self._name = exposure, hello.name
        status = Status.REVOKED if exposure.region is None else Status.GOOD
        self.channel.say(Welcome(status, Welcome.proven(exposure.secret, hello.nonce, status)))
        if status is Status.REVOKED:
            return
        self._fabric = Fabric(hello.fabric)
        device = self._served.device
        _require(self._fabric is Fabric.GLOO or device.type == "cuda", "a reader that wants NCCL")
        self._slots = Slots(self._fabric, device)
        self._pair = Pair(self.channel, OWNER, self._fabric, device, hello.seconds)

    def _note(self, plan: messages.Plan) -> None:
        """A plan, if it asks for what there is."""
        assert self.exposure is not None
        region = self.exposure.region
        _require(len(self._plans) < _MOST_PLANS and plan.number not in self._plans, "a plan")
        if region is not None and self._slots is not None:
            _require_within(plan.buckets, region.sizes, self._slots.nbytes)
        self._plans[plan.number] = _Planned(plan.buckets)

    def _advance(self, pair: Pair) -> bool:
        if not self._is_ready:
            if not pair.is_made():
                return False
            self.channel.say(Ready())
            self._is_ready = True
            return True
        moved = False
        while self._sending and self._sending[0].broadcast.wait(0):
            self._sending.popleft()
            moved = True
        if not self._sending:
            self._served.turns.give_back(self)
        while self._passes and self._send_of(self._passes[0], pair):
            moved = True
        return moved

    def _send_of(self, one: _Pass, pair: Pair) -> bool:
        """Send the next bucket of a pass, or end it; whether either could be done."""
        assert self.exposure is not None
        region = self.exposure.region
        if region is None or one.is_stopped:
            return self._end(one, Status.STOPPED if region is not None else Status.REVOKED)
        if one.sent == len(one.plan):
            return self._end(one, Status.GOOD)
        slot = one.sent % SLOTS
        if one.sent >= one.until or any(each.slot == slot for each in self._sending):
            return False
        if self._fabric is Fabric.NCCL and not self._served.turns.take(self):
            return False
        assert self._slots is not None
        work = self._served.work
        work.behind_caller()
        with work.current():
            try:
                packed = one.plan.pack(one.sent, region, self._slots)
            except ManifestMismatch:  # whoever exposed it has freed it
                return self._end(one, Status.REVOKED)
            self.channel.say(Sending(one.number, one.sent))
            self.channel.flush()
            self._sending.append(_Sent(slot, pair.send(packed)))
        one.sent += 1
        return True

    def _end(self, one: _Pass, status: Status) -> bool:
        self.channel.say(End(one.number, status))
        self._passes.remove(one)
        return True


def _require(makes_sense: bool, what: str) -> None:
    if not makes_sense:
        raise Garbage(f"{what} that makes no sense")


def _require_within(buckets: Sequence[Sequence[Row]], sizes: Sequence[int], most: int) -> None:
    for rows in buckets:
        _require(sum(nbytes for _, _, nbytes in rows) <= most, "a bucket")
        for buffer, offset, nbytes in rows:
            _require(buffer < len(sizes) and 0 < nbytes <= sizes[buffer] - offset, "a plan")
