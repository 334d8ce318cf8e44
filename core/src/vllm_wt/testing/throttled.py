"""For tests only: importing this where ``VLLM_WT_TEST_WIRE_MB_S`` is set slows what workers read.

Within a host a transport copies in one call, at the speed of memory; between hosts bytes come at the
network's pace, and the processor is free meanwhile. With this, a pass is driven only as fast as its
bytes would have come at the given rate, and is not done before: whoever waits for it sleeps between
two polls, as with a real network.

It is in effect for the whole process from then on, on transports that are made later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_wt.engine import WorkerContext
from vllm_wt.errors import InvalidInfo
from vllm_wt.pull.worker import PullEngine
from vllm_wt.transport import Progress, Transport

RATE = "VLLM_WT_TEST_WIRE_MB_S"
"""Environment variable: megabytes (10**6 bytes) a second, for each worker."""


@dataclass
class _Pass:
    """A pass of the real transport, and how far it has been driven."""

    operation: Any
    began: float
    progress: Progress


def throttled(
    transport_cls: type[Transport], rate: float, clock: Callable[[], float] = time.monotonic
) -> type[Transport]:
    """The same transport with a slower wire.

    Args:
        transport_cls: The real one.
        rate: Bytes a second. Passes follow each other as if the wire were idle between them.
        clock: Seconds.
    """

    def submit(self: Any, plan: Any) -> _Pass:
        return _Pass(base.submit(self, plan), clock(), Progress(False, 0))

    def poll(self: Any, each: _Pass) -> Progress:
        come = int((clock() - each.began) * rate)
        if not each.progress.done and come >= each.progress.nbytes:
            each.progress = base.poll(self, each.operation)
        if come < each.progress.nbytes:
            return Progress(False, come)
        return each.progress

    def cancel(self: Any, each: _Pass) -> bool:
        return bool(base.cancel(self, each.operation))

    base: Any = transport_cls
    return type(
        f"Throttled{transport_cls.__name__}",
        (transport_cls,),
        {"submit": submit, "poll": poll, "cancel": cancel},
    )


def rate_of(text: str) -> float | None:
    """Bytes a second from the variable's value; None for an empty one.

    Raises:
        InvalidInfo: It is no rate.
    """
    if not text:
        return None
    try:
        rate = float(text) * 1e6
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise InvalidInfo(
            "This is no rate for the wire",
            where=RATE,
            expected="megabytes a second, more than 0",
            got=repr(text),
            cure=f"{RATE}=200, say, or unset it",
        )
    return rate


class ThrottledWire:
    """Carries the import into vLLM's workers, as their ``worker_extension_cls``."""


def _install(rate: float) -> None:
    original = PullEngine.__init__

    def init(
        self: PullEngine,
        context: WorkerContext,
        transport_cls: type[Transport],
        *,
        choose: Any = None,
    ) -> None:
        named = choose and (lambda name: throttled(choose(name), rate))
        original(self, context, throttled(transport_cls, rate), choose=named)

    PullEngine.__init__ = init  # type: ignore[method-assign]


if (_rate := rate_of(os.environ.get(RATE, ""))) is not None:
    _install(_rate)
