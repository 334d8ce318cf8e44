"""How a trainer and its workers come together in the native form: all say who they are, the trainer
judges, and only then all make a communicator.

A failure of one is a failure of all, which hear of it at the trainer's store. Nobody who comes later
can get into a group: a store that has been closed to members is taken for an earlier trainer's.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from vllm_wt.caller import Caller
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Timeout,
    WeightTransferError,
)
from vllm_wt_nccl.communicator import Communicator
from vllm_wt_nccl.fabrics import opened
from vllm_wt_nccl.meeting import decoded, error_in
from vllm_wt_nccl.native_keys import (
    CAME,
    CLOSED,
    COMPLETE,
    FAILED,
    GO,
    HEARD,
    MADE,
    MEMBERS,
    SESSION,
    TRAINER,
)
from vllm_wt_nccl.native_members import Member, missing, require_fitting
from vllm_wt_nccl.quarantine import give_up_when_made
from vllm_wt_nccl.rendezvous import Rendezvous, awaited, bounded

TELL_S = 2.0
"""Seconds that it may take to tell the others of a failure, or to see that they have heard."""
_REFUSED_S = 10.0
"""Seconds that workers on their way to a trainer that has refused one of them have to get there."""
_AGAIN_S = 0.1
"""Seconds between two tries to find the trainer."""

BACKEND = "nccl"


def watching(rendezvous: Rendezvous, key: str, deadline: Deadline) -> Callable[[], None]:
    """A look at whether an error was left under a key, which it raises."""

    def watch() -> None:
        # After the deadline whoever waits says what for.
        if not deadline.expired and rendezvous.has(key, deadline):
            said = rendezvous.get(key, deadline, "an error")
            raise error_in(said)

    return watch


def told(error: BaseException, whose: str) -> WeightTransferError:
    """An error as the others are to hear it.

    Args:
        error: Of any kind.
        whose: Who has failed.
    """
    if isinstance(error, WeightTransferError):
        return error
    return Aborted(
        f"{whose} has given up: {type(error).__name__}: {error}",
        cure="see its own error; connect again",
    )


def leave_error(
    rendezvous: Rendezvous, key: str, error: WeightTransferError, deadline: Deadline
) -> None:
    """Tell the others, unless they have been told of another error before."""
    with suppress(WeightTransferError):  # then they see that this side has gone
        rendezvous.offer(key, json.dumps(error.facts()), deadline)


def gathered(rendezvous: Rendezvous, trainer: Member, deadline: Deadline) -> list[Member]:
    """The trainer's side: all workers, once they have come and fit.

    Raises:
        InvalidInfo: They don't fit.
        Timeout: Some have not come.
    """
    failed = watching(rendezvous, FAILED, deadline)
    rendezvous.put(TRAINER, json.dumps(trainer.to_wire()), deadline)
    workers: list[Member] = []

    def who_is_missing(came: int) -> str:
        return missing(trainer, workers)

    while len(workers) < trainer.world_size - 1:
        what = "Not all workers have come to the trainer"
        try:
            rendezvous.reached(CAME, len(workers) + 1, deadline, what, failed, who_is_missing)
        except Timeout as error:  # of a worker, maybe: who is missing says more
            error.got = error.got or missing(trainer, workers)
            raise
        workers = _members(rendezvous.get(MEMBERS, deadline, "The workers do not say who they are"))
        require_fitting(trainer, workers)
    rendezvous.put(CLOSED, "", deadline)
    rendezvous.put(GO, "\n".join(json.dumps(each.to_wire()) for each in workers), deadline)
    return workers


def let_hear(rendezvous: Rendezvous, error: WeightTransferError, remaining: float) -> None:
    """The trainer's side has failed: keep the store until those that have come know why.

    Args:
        rendezvous: Its.
        error: Why.
        remaining: Seconds that it had left for all to come.
    """
    with suppress(WeightTransferError):
        refused = isinstance(error, InvalidInfo)
        deadline = Deadline(max(TELL_S, min(_REFUSED_S, remaining)) if refused else TELL_S)
        rendezvous.offer(FAILED, json.dumps(error.facts()), deadline)
        rendezvous.put(CLOSED, "", deadline)
        if not rendezvous.has(MEMBERS, deadline):
            return
        came = _members(rendezvous.get(MEMBERS, deadline, "The workers do not say who they are"))
        # Where one worker of an engine has come, the others are on their way.
        engines = Counter((each.first, each.workers) for each in came)
        coming = sum(max(workers, here) for (_, workers), here in engines.items())
        rendezvous.reached(HEARD, coming, deadline, "Not all workers have heard of it")


class Joining:
    """A worker's side of coming together.

    Args:
        address: Of the trainer, as it was given.
        port: Likewise.
        worker: This one.
    """

    def __init__(self, address: str, port: int, worker: Member) -> None:
        self._address = address
        self._port = port
        self._worker = worker
        self.rendezvous: Rendezvous | None = None
        """Once the trainer is found."""
        self.way = ""
        """Address of this host by which it is reached."""

    def join(self, deadline: Deadline) -> tuple[Member, list[Member]]:
        """Find the trainer and be let in; it and all workers.

        Raises:
            InvalidInfo: Somebody's numbers don't fit.
            Timeout, Aborted: The trainer or another worker has not come; or it was given up.
            PeerDead: The trainer has gone.
        """
        rendezvous = self.rendezvous = self._found(deadline)
        rendezvous.append(MEMBERS, f"{json.dumps(self._worker.to_wire())}\n", deadline)
        rendezvous.add(CAME, 1, deadline)
        failed = watching(rendezvous, FAILED, deadline)
        what = "The trainer does not let this worker in: it waits for others"
        said = rendezvous.get(GO, deadline, what, failed)
        trainer = _member(rendezvous.get(TRAINER, deadline, "The trainer does not say who it is"))
        workers = _members(said)
        if self._worker.token not in {each.token for each in workers}:
            require_fitting(trainer, [*workers, self._worker])
            raise _shut(trainer)
        require_fitting(trainer, workers)
        return trainer, workers

    def fail(self, error: WeightTransferError) -> None:
        """This worker has failed, or has heard that another one has."""
        if self.rendezvous is not None:
            deadline = Deadline(TELL_S)
            leave_error(self.rendezvous, FAILED, error, deadline)
            with suppress(WeightTransferError):
                self.rendezvous.add(HEARD, 1, deadline)
            self.rendezvous.close()

    def _found(self, deadline: Deadline) -> Rendezvous:
        caller = Caller("vllm-wt-rendezvous")
        where = f"{self._address}, port {self._port}"
        why: WeightTransferError | None = None
        while True:
            deadline.check(
                "The trainer has not come to where this worker was told to meet it",
                where=where,
                got=why.what if why else "no answer",
            )
            try:
                theirs, self.way = bounded(
                    caller,
                    lambda: _ends(self._address, self._port, deadline.remaining()),
                    deadline,
                    "The trainer's address does not answer",
                    where=where,
                )
                rendezvous = Rendezvous.join(SESSION, theirs, self._port, deadline)
                if not rendezvous.has(CLOSED, deadline):
                    return rendezvous
                self.rendezvous = rendezvous  # which is to know that its failure was heard
                watching(rendezvous, FAILED, deadline)()
                self.rendezvous = None
                trainer = rendezvous.get(TRAINER, deadline, "The trainer does not say who it is")
                why = _shut(_member(trainer))
            except PeerDead as error:
                why = error
            deadline.wait(_AGAIN_S)


def made_together(
    rendezvous: Rendezvous,
    trainer: Member,
    rank: int,
    address: str,
    device: torch.device,
    deadline: Deadline,
) -> Communicator:
    """The communicator, once all members have it.

    Args:
        rendezvous: Where they meet.
        trainer: Rank 0.
        rank: Of this side.
        address: Of this host.
        device: Of the buffers.
        deadline: For all of it.

    Raises:
        WeightTransferError: A member has failed, or not come; or cannot be reached.
    """
    size = trainer.world_size
    failed = watching(rendezvous, FAILED, deadline)
    store = rendezvous.apart("group", deadline)
    making: Future[Any] = Caller("vllm-wt-communicator")(
        lambda: opened(store, rank, size, address, device, deadline.remaining())
    )
    what = "Not all members have come to the communicator in time"
    try:
        communicator: Communicator = awaited(
            making, deadline, what, where=f"rank {rank} of {size}, {device}", watch=failed
        )
        rendezvous.add(MADE, 1, deadline)
        if rank == 0:
            rendezvous.reached(
                MADE, size, deadline, what, failed, lambda made: f"{made} of {size} members have it"
            )
            rendezvous.put(COMPLETE, "", deadline)
        else:
            rendezvous.get(COMPLETE, deadline, what, failed)
    except BaseException:
        give_up_when_made(making)
        raise
    return communicator


def require_one_host(address: str) -> None:
    """Refuse an address that is none.

    Raises:
        InvalidInfo: It stands for all of a host's.
    """
    if address.strip("[]") in {"0.0.0.0", "::", "0"}:
        raise InvalidInfo(
            "This address stands for all of a host's, and nobody can connect to it",
            where="master_address",
            expected="one address of the trainer's host",
            got=address,
            cure="give the one that the engines' hosts reach; 127.0.0.1 where all are on one host",
        )


def _ends(address: str, port: int, seconds: float) -> tuple[str, str]:
    """The numeric addresses of both ends of a connection to the trainer: theirs, and ours.

    A name may have several; whichever answers is the one that the trainer listens at.
    """
    try:
        with socket.create_connection((address.strip("[]"), port), max(0.01, seconds)) as probe:
            return str(probe.getpeername()[0]), str(probe.getsockname()[0])
    except OSError as error:
        raise PeerDead(
            f"The trainer is not reached: {error}",
            where=f"{address}, port {port}",
            expected="its rendezvous",
            got="no connection",
            cure="see whether the trainer runs, and whether master_address leads to its host",
        ) from error


def _shut(trainer: Member) -> PeerDead:
    return PeerDead(
        "The group of an earlier trainer, which takes no members any more, is at this address",
        where="master_address, master_port",
        expected="a trainer that waits for this worker",
        got=f"that of {trainer.title}, with world_size={trainer.world_size}",
        cure="end that trainer, or close its group; give a new one a port that is free",
    )


def _member(said: bytes | str) -> Member:
    line = said.encode() if isinstance(said, str) else said
    return Member.from_wire(decoded(line, "a member"), backend=BACKEND)


def _members(said: bytes) -> list[Member]:
    try:
        lines = said.decode().splitlines()
    except UnicodeDecodeError as error:
        raise CorruptTransfer(
            f"What was left at the rendezvous is no list of members: {error}",
            where="rendezvous",
            got=repr(said[:100]),
            cure="see who else uses the trainer's port",
        ) from None
    return [_member(line) for line in lines]
