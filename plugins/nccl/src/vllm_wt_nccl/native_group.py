"""One side's place in a group of the native form, from the day it is made until a round breaks it."""

from __future__ import annotations

from contextlib import suppress

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Aborted, PeerDead, WeightTransferError, WrongOrder
from vllm_wt_nccl.communicator import Communicator
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.native_keys import OVER, ROUND
from vllm_wt_nccl.native_meeting import TELL_S, leave_error, told, watching
from vllm_wt_nccl.quarantine import give_up
from vllm_wt_nccl.rendezvous import Rendezvous


class Group:
    """A communicator, and the store at which its members tell each other how rounds go.

    In the trainer it is what ``trainer_init`` returns. A round that fails once broadcasts have begun
    breaks it for all: what a fabric for collectives does after an error is anybody's guess. Both sides
    then make a new one.

    Args:
        rendezvous: Where the trainer keeps the store.
        communicator: With all members.
        rank: Of this side.
        world_size: All ranks.
        device: Of the buffers.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        communicator: Communicator,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._communicator: Communicator | None = communicator
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.last = 0
        """Number of the last round that this side took part in."""
        self._why: WeightTransferError | None = None

    def __repr__(self) -> str:
        state = "open" if self._communicator is not None else "closed"
        return f"<Group rank {self.rank} of {self.world_size} on {self.device}, {state}>"

    @property
    def rendezvous(self) -> Rendezvous:
        if self._rendezvous is None:
            raise self._broken()
        return self._rendezvous

    @property
    def communicator(self) -> Communicator:
        if self._communicator is None:
            raise self._broken()
        return self._communicator

    def require_whole(self, deadline: Deadline) -> None:
        """See that it can be used.

        Raises:
            WrongOrder: A failed round has broken it, or it was closed.
            PeerDead: A member has left it, or the trainer has gone.
        """
        _ = self.communicator
        watching(self.rendezvous, OVER, deadline)()

    def refuse(self, error: WeightTransferError) -> None:
        """The round that the trainer has begun is not for this side; others need not wait for it."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            return
        with suppress(WeightTransferError):
            deadline = Deadline(TELL_S)
            begun = rendezvous.add(ROUND, 0, deadline)
            if begun > self.last:
                self.last = begun
                leave_error(rendezvous, Keys(begun).failed, error, deadline)

    def fail(
        self, keys: Keys, error: BaseException, *, whose: str, has_begun: bool
    ) -> BaseException:
        """A round has failed on this side: tell the others, unless it failed elsewhere before.

        Args:
            keys: Of the round.
            error: What has failed here.
            whose: Side this is, for the others.
            has_begun: Whether broadcasts have, which ends the group.

        Returns:
            What failed first.
        """
        first = error
        deadline = Deadline(TELL_S)  # of all that is told: a store that is stopped answers nothing
        if self._rendezvous is not None:
            try:
                watching(self._rendezvous, keys.failed, deadline)()
            except WeightTransferError as elsewhere:
                is_same = isinstance(error, WeightTransferError) and (
                    error.facts() == elsewhere.facts()
                )
                first = error if is_same or deadline.expired else elsewhere
            leave_error(self._rendezvous, keys.failed, told(first, whose), deadline)
        if has_begun:
            self._break_off(told(first, whose), deadline)
        return first

    def _break_off(self, error: WeightTransferError, deadline: Deadline) -> None:
        """Give it up for all; idempotent."""
        self._why = self._why or error
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        if self._rendezvous is not None:
            leave_error(self._rendezvous, OVER, error, deadline)
        give_up(communicator)

    def close(self) -> None:
        """Leave it, which ends it for all; idempotent."""
        whose = "The trainer" if self.rank == 0 else f"The worker of rank {self.rank}"
        left = PeerDead(f"{whose} has left the group", cure="make a new one, on all sides")
        self._break_off(left, Deadline(TELL_S))
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def forget(self, ticket: int, deadline: Deadline) -> None:
        """What was left for a round that nobody asks for any more."""
        for key in Keys(ticket).all:
            self.rendezvous.delete(key, deadline)

    def _broken(self) -> WrongOrder:
        why = self._why or Aborted("it was closed", cure="make a new one")
        return WrongOrder(
            f"This group is no more: {why.what}",
            where=f"rank {self.rank} of {self.world_size}",
            expected="a group that no failure has ended",
            got=type(why).__name__,
            cure="make a new one: trainer_init in the trainer, init_weight_transfer_engine in vLLM",
        )
