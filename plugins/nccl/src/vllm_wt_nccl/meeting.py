"""How a round's members find each other: what is left at the rendezvous, and the communicator.

In each round every worker leaves its number; the trainer waits for as many as there are, and calls
them. With the same members as before they go on with the communicator that they have.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from vllm_wt.caller import Caller
from vllm_wt.deadline import Deadline
from vllm_wt.errors import CorruptTransfer, WeightTransferError, from_facts
from vllm_wt_nccl.communicator import Communicator
from vllm_wt_nccl.fabrics import opened
from vllm_wt_nccl.info import Call
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.quarantine import give_up_when_made
from vllm_wt_nccl.rendezvous import Rendezvous, awaited

WORKERS = "workers"
"""How many workers have come, which numbers them from 1."""
_LOOK_S = 0.05
"""Seconds between two looks at whether a round has failed elsewhere."""
_TELL_S = 2.0
"""Seconds that it may take to tell the others of a failure."""


class Watch:
    """Raises when a round has failed elsewhere, or the trainer has gone.

    Args:
        rendezvous: Where that is told.
        keys: Of the attempt.
        deadline: Of the round.
    """

    def __init__(self, rendezvous: Rendezvous, keys: Keys, deadline: Deadline) -> None:
        self._rendezvous = rendezvous
        self._keys = keys
        self._deadline = deadline
        self._next = time.monotonic() + _LOOK_S

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        if self._rendezvous.has(self._keys.failed, self._deadline):
            said = self._rendezvous.get(self._keys.failed, self._deadline, "an error")
            raise error_in(said)
        self._next = time.monotonic() + _LOOK_S


def tell(rendezvous: Rendezvous, keys: Keys, error: WeightTransferError) -> None:
    """The others need not wait for this side.

    Raises:
        WeightTransferError: They could not be told.
    """
    rendezvous.put(keys.failed, json.dumps(error.facts()), Deadline(_TELL_S))


def numbers(said: bytes) -> list[int]:
    """The workers who take part, in order.

    Raises:
        CorruptTransfer: These are no numbers.
    """
    try:
        return sorted(map(int, said.decode().split()))
    except ValueError:
        raise _corrupt(said, "a list of workers", "numbers") from None


def decoded(said: bytes, what: str) -> dict[str, Any]:
    """What somebody has left, as the JSON object that it must be.

    Raises:
        CorruptTransfer: It is none.
    """
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _corrupt(said, what, "a JSON object")
    return found


def error_in(said: bytes) -> WeightTransferError:
    """The error whose facts somebody has left.

    Raises:
        CorruptTransfer: They are none.
    """
    facts = decoded(said, "an error")
    try:
        return from_facts(facts)
    except (ValueError, TypeError, RecursionError):
        raise _corrupt(said, "an error", "its facts") from None


def _corrupt(said: bytes, what: str, expected: str) -> CorruptTransfer:
    return CorruptTransfer(
        f"What was left at the rendezvous is not {what}",
        where="rendezvous",
        expected=expected,
        got=repr(said[:100]),
        cure="connect again; if it stays, see who else uses the trainer's port",
    )


def made(
    rendezvous: Rendezvous,
    call: Call,
    rank: int,
    address: str,
    device: torch.device,
    deadline: Deadline,
    sender: int = 0,
) -> Communicator:
    """The communicator of a call, with all its members; each makes it at the same time.

    Args:
        rendezvous: Where they meet.
        call: Of the trainer.
        rank: Of this side, 0 for the trainer's.
        address: Of this host, by which the others reach it.
        device: Of the buffers.
        deadline: Of the round.
        sender: The trainer's rank whose communicator it is.

    Raises:
        WeightTransferError: A member has not come in time, or cannot be reached.
    """
    store = rendezvous.apart(f"group/{call.group}/{sender}", deadline)
    size = 1 + len(call.members)
    making = Caller("vllm-wt-communicator")(
        lambda: opened(store, rank, size, address, device, deadline.remaining())
    )
    what = "Not all members have come to the communicator in time"
    try:
        communicator: Communicator = awaited(
            making, deadline, what, where=f"rank {rank} of {size}, {device}"
        )
    except BaseException:
        give_up_when_made(making)
        raise
    return communicator
