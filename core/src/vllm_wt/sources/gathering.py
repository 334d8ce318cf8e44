"""Gathers among the ranks of a trainer that end in time, though a rank is missing in one.

Such a collective would wait as long as the trainer's own process group lets it, half an hour by
default. A source makes its tensors wherever it is walked, and knows nothing of rounds, so how long they
may take is a setting of whoever walks it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from vllm_wt.caller import Caller, has_ended
from vllm_wt.deadline import Deadline
from vllm_wt.errors import Timeout, TransportError

_LOOK_S = 0.25
"""Seconds after which an interrupt is noticed that came just before a wait."""
_LEAST_S = 2.0
"""Seconds that a gather has after the deadline, too: ranks that live come to it, and the walk through
the weights that all of them have begun can be brought to its end."""
# A new process group of the same ranks would not do: for torch its mesh equals the old one, and what it
# keeps of operations brings a DTensor back to that.
_ANEW = "Then restart the trainer's ranks"


class _Patience:
    """How long gathers may take, and who makes them."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.caller = Caller("vllm-wt-gather")


_patience: ContextVar[_Patience | None] = ContextVar("vllm_wt_gathers_within", default=None)
_given_up: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups in which a gather was left: what is gathered next could meet it on another rank."""


@contextmanager
def gathers_within(deadline: Deadline) -> Iterator[None]:
    """Within this, gathers that this thread asks for have until then."""
    token = _patience.set(_Patience(deadline))
    try:
        yield
    finally:
        _patience.reset(token)


def gathered(name: str, dtensor: Any, *, where: str) -> torch.Tensor:
    """The full tensor of a DTensor, made on a thread that is left to itself when the time is over.

    Args:
        name: Of the tensor.
        dtensor: One whose mesh this rank is in.
        where: It is needed.

    Raises:
        Timeout: The time is over.
        TransportError: A gather of these ranks was left before.
        Exception: What torch raises.
    """
    groups = dtensor.device_mesh.get_all_groups()
    if any(group in _given_up for group in groups):
        raise TransportError(
            f"Tensor {name!r} is spread over ranks of which one did not come to an earlier gather",
            where=where,
            expected="ranks that have made the same gathers",
            got="one that may still be at that gather, and would take this one for it",
            cure="see why a rank was late, or is missing. " + _ANEW,
        )
    patience = _patience.get()
    if patience is None:
        full: torch.Tensor = dtensor.full_tensor()
        return full
    stream = _stream_of(dtensor)

    def gather() -> torch.Tensor:
        with stream:  # which a thread has of its own
            full: torch.Tensor = dtensor.full_tensor()
            return full

    future = patience.caller(gather)
    deadline = Deadline(max(_LEAST_S, patience.deadline.remaining()))
    try:
        while not has_ended(future, min(_LOOK_S, deadline.remaining())):
            if deadline.expired:
                raise Timeout(
                    f"Tensor {name!r} was not gathered in time",
                    where=where,
                    expected=f"all ranks of its mesh, within {patience.deadline.seconds:g} s",
                    got="some that have not come to it",
                    cure="let every rank of the mesh take part: connect with group= on all of them, or "
                    f"call take_part on the others for each push. {_ANEW}",
                )
    except BaseException:  # an interrupt, too
        _given_up.update(groups)
        raise
    made: torch.Tensor = future.result()
    return made


def _stream_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The stream that is used here, for another thread to use."""
    if not tensor.is_cuda:
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(
        torch.cuda.current_stream(tensor.device)
    )
    return stream
