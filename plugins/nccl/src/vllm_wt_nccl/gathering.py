"""Gathers among the ranks of a trainer that end in time, though a rank has died in one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_wt.caller import Caller
from vllm_wt.deadline import Deadline
from vllm_wt.sources.whole import whole
from vllm_wt_nccl.rendezvous import bounded

_WHERE = "gather"


class Gathering:
    """Makes full tensors, each a collective of all ranks of its mesh.

    Its wait would end at the timeout of the trainer's own process group, which is longer than a push
    may take: who waits for a rank that waits for a dead one hears of nothing. So it is made on a
    thread, which is left to itself when the time is over. The group is of no use by then.

    Args:
        patience: Gives the deadline of a gather that begins now.
    """

    def __init__(self, patience: Callable[[], Deadline]) -> None:
        self._patience = patience
        self._caller = Caller("vllm-wt-gather")

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor.

        Raises:
            InvalidInfo, TransportError: As of `whole`.
            Timeout: A rank has not come in time.
        """
        stream = _stream_of(tensor)

        def gather() -> torch.Tensor:
            with stream:  # which a thread has of its own
                return whole(name, tensor, where=_WHERE)

        full: torch.Tensor = bounded(
            self._caller,
            gather,
            self._patience(),
            f"Tensor {name!r} was not gathered from the trainer's ranks in time",
            where=_WHERE,
        )
        return full


def _stream_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The stream that is used here, for another thread to use."""
    if not tensor.is_cuda:
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(
        torch.cuda.current_stream(tensor.device)
    )
    return stream
