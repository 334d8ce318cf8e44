"""Communicators that cannot be closed at once are closed later, without anybody asking."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from vllm_wt_nccl.quarantine import give_up, give_up_when_made

LONG_S = 30.0


class Busy:
    """Whose broadcasts end when they are told to."""

    def __init__(self) -> None:
        self.is_over = False
        self.closed = threading.Event()

    def broadcast(self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0) -> Any:
        raise NotImplementedError

    def close(self) -> bool:
        if self.is_over:
            self.closed.set()
        return self.is_over


def test_one_that_is_idle_is_closed_at_once() -> None:
    idle = Busy()
    idle.is_over = True
    assert give_up(idle)
    assert idle.closed.is_set()


def test_those_that_are_busy_are_closed_each_in_its_time() -> None:
    first, second = Busy(), Busy()
    assert not give_up(first)
    assert not give_up(second)
    second.is_over = True
    assert second.closed.wait(LONG_S)
    assert not first.closed.is_set()
    first.is_over = True
    assert first.closed.wait(LONG_S)
    third = Busy()  # its thread may have ended by now
    assert not give_up(third)
    third.is_over = True
    assert third.closed.wait(LONG_S)


def test_one_that_comes_when_nobody_waits_any_more() -> None:
    making: Future[Any] = Future()
    give_up_when_made(making)
    late = Busy()
    making.set_result(late)
    assert not late.closed.is_set()
    late.is_over = True
    assert late.closed.wait(LONG_S)
