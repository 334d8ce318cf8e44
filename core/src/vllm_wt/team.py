"""Ranks of a trainer that each have weights of their own to be read, and agree on every step."""

from __future__ import annotations

import ctypes
import json
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from vllm_wt.beats import Beats
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    CorruptTransfer,
    Timeout,
    TransportError,
    WeightTransferError,
    WrongOrder,
    from_text,
    to_text,
)
from vllm_wt.group import store_group_of

_c10d: Any = dist.distributed_c10d
_LEAST_S = 0.001
"""Least seconds to wait: torch takes a timeout of 0 ms for none."""
_LOOK_S = 0.0002
"""Seconds between two looks at whether the others have come: an interrupt does not wait for them."""
_LEFT_S = 0.1
"""The same at whether what was given up has come to its end."""
_MEET_S = 0.01
"""The same of a store, which each look asks."""
_TRIES = 5
"""How many times its timeout gloo takes to connect, where a rank that was met is gone again."""
_MOST_BYTES = 1 << 28
_FAILED, _WELL = 1, 2
_AGAIN = "see that every rank of the group is alive and makes the same calls; connect again on all"


class Word:
    """What the first rank says at the end of a round, before anybody else has to say something.

    Args:
        work: Its way from there to here.
        flag: Where it is then.
    """

    def __init__(self, work: Any, flag: torch.Tensor) -> None:
        self._work = work
        self._flag = flag

    @property
    def is_bad(self) -> bool:
        """Whether it has come and says that the round has failed, or can come no more."""
        return bool(self._work.is_completed()) and int(self._flag) != _WELL


class Team:
    """The ranks of a process group, connected apart from it: what fails here disturbs no collective
    of the trainer's, nor the names of groups it makes later.

    Every rank makes one at the same time. Once a rank has waited in vain, is gone or has closed its
    own, all of them fail at once, and a new one has to be made.

    Args:
        group: The ranks, in order; the first one leads. A process group, or a `StoreGroup`.
        deadline: For all of them to be there.

    Raises:
        InvalidInfo: This process is not in the group.
        Timeout, TransportError: The ranks did not find each other.
    """

    grace_s: ClassVar[float] = 15.0
    """Seconds beyond a deadline that ranks wait for each other; a round has two such waits at most."""

    def __init__(self, group: Any, deadline: Deadline) -> None:
        found, self.ranks = store_group_of(group)
        """Each of them as ``torch.distributed`` counts it, and the mesh of a DTensor."""
        store, self.rank, self.size = found.store, found.rank, found.size
        self.has_agreed = False
        """Whether the ranks have exchanged anything yet."""
        try:
            name = _meet(store, self.rank, self.size, deadline)
            seconds = self._patience(self._patience(deadline)).seconds / _TRIES
            own = _c10d.PrefixStore(f"vllm-wt/{name}", store)
            self._gloo: Any = _c10d.ProcessGroupGloo(own, self.rank, self.size, _delta(seconds))
            self._beats = Beats(own, self.rank, self.size)
        except RuntimeError as error:  # torch's errors of a store and of a network are among these
            raise _failed(error, "connect", deadline.seconds) from error

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the engines."""
        return self.rank == 0

    def agree(
        self,
        said: dict[str, Any],
        error: WeightTransferError | None,
        deadline: Deadline,
        *,
        where: str,
    ) -> list[dict[str, Any]]:
        """:meth:`exchange` for a step that has come to a good end on every rank, or on none.

        Raises:
            WeightTransferError: ``error``, if that is something; or what failed on another rank.
        """
        text = None if error is None else to_text(error)
        try:
            told = self.exchange({**said, "error": text}, deadline, where=where)
        except WeightTransferError as lost:
            if error is not None:
                raise error from lost
            raise
        if error is not None:
            raise error
        for rank, each in enumerate(told):
            if each["error"] is not None:
                raise error_of(rank, each["error"], where=where)
        return told

    def exchange(
        self, said: dict[str, Any], deadline: Deadline, *, where: str
    ) -> list[dict[str, Any]]:
        """What every rank says, by rank; all of them must call it.

        Args:
            said: JSON-safe.
            deadline: For all of them.
            where: Names the step, in errors and to the others.

        Raises:
            Timeout: A rank has not come: it is somewhere else.
            PeerDead: Its process is stopped, or its host is gone.
            TransportError: A rank is gone.
            WrongOrder: Another one is at another step.
        """
        self.has_agreed = True
        try:
            told = self._exchange({**said, "step": where}, self._patience(deadline), where)
            steps = [each["step"] for each in told]
            if steps != [where] * self.size:
                raise WrongOrder(
                    "The ranks of the trainer do not make the same calls",
                    where=where,
                    expected=f"{where} on all ranks",
                    got=", ".join(f"{step} on rank {rank}" for rank, step in enumerate(steps)),
                    cure=_AGAIN,
                )
        except BaseException:  # an interrupt, too: the next exchange would be given these answers
            self.close()
            raise
        return told

    def say(self, *, failed: bool, deadline: Deadline) -> Word:
        """The first rank's word on a round; the others listen to just one."""
        return self._word(_FAILED if failed else _WELL, deadline)

    def listen(self, deadline: Deadline) -> Word:
        """The word of the first rank, to come."""
        return self._word(0, deadline)

    @property
    def is_over(self) -> bool:
        """Whether the ranks have lost each other, or have left."""
        return self._gloo is None

    def close(self) -> None:
        """Leave: who waits for this rank is told. Idempotent."""
        self._gloo = None
        self._beats.close()

    def _patience(self, deadline: Deadline) -> Deadline:
        return Deadline(deadline.remaining() + self.grace_s)

    def _word(self, value: int, deadline: Deadline) -> Word:
        flag = torch.tensor([value])
        seconds = self._patience(deadline).seconds
        options = _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _delta(seconds)
        try:
            return Word(self._connected().broadcast([flag], options), flag)
        except RuntimeError as error:
            raise _failed(error, "settle", seconds) from error

    def _exchange(
        self, said: dict[str, Any], deadline: Deadline, where: str
    ) -> list[dict[str, Any]]:
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(data)]), deadline, where)
        longest = max(int(size) for size in sizes)
        if longest > _MOST_BYTES:
            raise CorruptTransfer(
                "A rank of the trainer says more than the others can take",
                where=where,
                expected=f"at most {_MOST_BYTES} bytes",
                got=longest,
                cure="send fewer, larger tensors",
            )
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        parts = self._gather(padded, deadline, where)
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _gather(self, mine: torch.Tensor, deadline: Deadline, where: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        options = _c10d.AllgatherOptions()
        # gloo's own: it lets all ranks know, and leaves nothing under way.
        options.timeout = _delta(deadline.remaining())
        try:
            work = self._connected().allgather([parts], [mine], options)
        except RuntimeError as error:
            raise _failed(error, where, deadline.seconds) from error
        self._beats.begin()
        try:
            while not work.is_completed():
                self._beats.check(where)
                time.sleep(_LOOK_S)
            work.wait()
        except RuntimeError as error:
            raise _failed(error, where, deadline.seconds) from error
        finally:
            self._beats.end()
            if not work.is_completed():
                _leave_to_itself(self._gloo, work)
        return parts

    def _connected(self) -> Any:
        if self._gloo is None:
            raise TransportError(
                "The ranks of the trainer have lost each other",
                where="group",
                expected="ranks that have been together since they connected",
                got="a round that some rank has left, or a session that was closed",
                cure=_AGAIN,
            )
        return self._gloo


def error_of(rank: int, text: str, *, where: str) -> WeightTransferError:
    """What another rank has said that failed there."""
    error = from_text(text, where=where)
    error.where = f"{error.where or where}, on rank {rank} of the trainer"
    return error


def _meet(store: Any, rank: int, size: int, deadline: Deadline) -> str:
    """A name that the ranks have agreed on, and that no attempt of theirs has had before.

    Numbers would not do: a rank whose connect has failed by itself has made one attempt less.
    """
    token = uuid.uuid4().hex
    store.set(f"vllm-wt/here/{rank}", token)
    try:
        if rank > 0:
            offer = f"vllm-wt/name/{token}"
            _await(lambda: store.check([offer]), deadline, "the first rank")
            return str(store.get(offer).decode())
        tokens: dict[int, str] = {}
        for other in range(1, size):
            key = f"vllm-wt/here/{other}"
            _await(partial(_is_told, store, key), deadline, f"rank {other}")
            tokens[other] = store.get(key).decode()
        for other_token in tokens.values():
            store.set(f"vllm-wt/name/{other_token}", token)
        return token
    finally:
        store.set(f"vllm-wt/here/{rank}", "")


def _leave_to_itself(gloo: Any, work: Any) -> None:
    """What is under way ends by its own timeout alone, and gloo's destructor waits for that: it is not
    called before, nor by the interpreter's end, for which there is a reference too many."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))

    def outlive() -> None:
        while not work.is_completed():
            time.sleep(_LEFT_S)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(gloo))

    threading.Thread(target=outlive, name="vllm-wt-team-left", daemon=True).start()


def _is_told(store: Any, key: str) -> bool:
    """It is empty where a rank was here before, and is not now."""
    return bool(store.check([key]) and store.get(key))


def _await(condition: Callable[[], Any], deadline: Deadline, whom: str) -> None:
    while not condition():
        deadline.check(
            "Not all ranks of the trainer have come to connect", where="connect", got=f"no {whom}"
        )
        deadline.wait(_MEET_S)


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, _LEAST_S))


def _failed(error: RuntimeError, where: str, seconds: float) -> WeightTransferError:
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    return (Timeout if timed_out else TransportError)(
        f"The ranks of the trainer could not agree: {error}",
        where=where,
        expected=f"all of them within {seconds:g} s",
        cure=_AGAIN,
    )
