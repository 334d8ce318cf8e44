"""The communicator of one owner and one reader, made while both go on with what they do."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt.caller import Caller
from vllm_wt.errors import PeerDead, WeightTransferError
from vllm_wt_nccl import quarantine
from vllm_wt_nccl.communicator import Broadcast, Communicator
from vllm_wt_nccl.fabrics import opened
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.channel import Channel
from vllm_wt_nccl.p2p.keys import ConnectionStore
from vllm_wt_nccl.p2p.messages import Fabric, Key

OWNER, READER = 0, 1
"""Ranks."""
_GIVE_UP_S = 3600.0
"""After so many seconds the fabric gives a bucket up by itself. Who waits has a deadline before that;
and a peer that is merely stopped must not break the pair."""


class Pair:
    """One side's half.

    Args:
        channel: To the other side.
        rank: Of this one.
        fabric: What carries the bytes.
        device: Of this side's transport.
        seconds: For making it.
    """

    def __init__(
        self, channel: Channel, rank: int, fabric: Fabric, device: torch.device, seconds: float
    ) -> None:
        self._store = ConnectionStore(channel.say, seconds)
        on = device if fabric is Fabric.NCCL else torch.device("cpu")
        make = partial(_made, self._store, rank, channel.here, on, seconds)
        self._making: Future[Communicator] | None = Caller("vllm-wt-pair")(make)
        self._communicator: Communicator | None = None
        self._is_nccl = fabric is Fabric.NCCL

    def take_in(self, told: Key) -> bool:
        """What the other side has left for this one; whether that makes sense."""
        return self._store.take_in(told)

    def is_made(self) -> bool:
        """Whether this half is.

        Raises:
            WeightTransferError: It can't be.
        """
        if self._making is not None and self._making.done():
            making, self._making = self._making, None
            try:
                self._communicator = making.result()
            except WeightTransferError as error:
                error.backend = BACKEND
                raise
            except Exception as error:
                raise PeerDead(
                    f"The pair can't be made: {error}",
                    backend=BACKEND,
                    where="open",
                    cure="see whether the other side runs, and its log; connect again",
                ) from error
        return self._communicator is not None

    def send(self, slot: torch.Tensor) -> Broadcast:
        """Start to send a slot (owner); the current stream's work on it is waited for."""
        assert self._communicator is not None
        return self._communicator.broadcast([slot], _GIVE_UP_S, OWNER)

    def receive(self, slot: torch.Tensor) -> Broadcast:
        """Start to receive what the owner sends next (reader)."""
        return self.send(slot)  # in a broadcast of two, rank says who sends

    def give_up(self) -> None:
        """End it, whatever is under way; nothing is waited for. Slots that are under way are held by
        the communicator until nothing is written there."""
        self._store.close()
        making, self._making = self._making, None
        communicator, self._communicator = self._communicator, None
        if making is not None:
            quarantine.give_up_when_made(making)
        elif communicator is not None and self._is_nccl:
            Caller("vllm-wt-pair")(partial(quarantine.give_up, communicator))  # an abort takes long
        elif communicator is not None:
            quarantine.give_up(communicator)


def _made(
    store: Store, rank: int, address: str, device: torch.device, seconds: float
) -> Communicator:
    """A communicator that has carried something: by the first message the sides connect, which waits
    for both, as nothing may that comes after it."""
    communicator = opened(store, rank, 2, address, device, seconds, is_pair=True)
    try:
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        sent = communicator.broadcast([first], seconds, OWNER)
        while not sent.wait(seconds):
            pass
    except BaseException:
        quarantine.give_up(communicator)
        raise
    return communicator
