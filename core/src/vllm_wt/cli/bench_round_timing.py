"""How ``vllm-wt bench round`` measures: rounds from outside, work of a device by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

_FLAT_NBYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
"""What is copied to find out the speed of memory: on a GPU so much that starting it is nothing."""
_BEST_OF = 10

Made = TypeVar("Made")


@dataclass(frozen=True)
class Rounds(Generic[Made]):
    """What was measured.

    Args:
        seconds: Of rounds before which both processes did something else for a while, as trainers do.
        made: What these returned.
        hot: Seconds of rounds right after each other.
    """

    seconds: list[float]
    made: list[Made]
    hot: list[float]


def timed_rounds(
    send: Callable[[int], Made],
    prepare: Callable[[int], None],
    check: Callable[[], None],
    *,
    warm_up: int,
    rounds: int,
    device: torch.device,
) -> Rounds[Made]:
    """Rounds that warm up, then some that are checked one by one, then as many right after each other.

    Args:
        send: The round, by its number from 1.
        prepare: What comes before each, not counted: is told how many are still to come.
        check: What comes after each of the former and after the last one, not counted.
        warm_up: Rounds before the first that counts.
        rounds: Of either kind.
        device: The trainer's: it is idle when a round begins, and when it ends.
    """
    last = warm_up + 2 * rounds
    took, made = [], []
    for number in range(1, last + 1):
        prepare(last - number)
        synchronize(device)
        began = time.perf_counter()
        made.append(send(number))
        synchronize(device)
        took.append(time.perf_counter() - began)
        if number <= warm_up + rounds or number == last:
            check()
    return Rounds(took[warm_up:-rounds], made[warm_up:-rounds], took[-rounds:])


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that a device is at work on something: on CUDA by events on the current stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = _event(), _event()
    torch.cuda.synchronize(device)
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a flat copy within the device reads and writes, together, at best."""
    source = torch.ones(_FLAT_NBYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = min(seconds_of(lambda: target.copy_(source), device) for _ in range(_BEST_OF))
    return 2 * source.nbytes / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
