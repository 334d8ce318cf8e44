"""Drives one engine through init and rounds, from the trainer's side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import StaleRound, TransportError, WeightTransferError, from_text

_DELIVERED_S = 0.001
"""Seconds between two looks at whether the workers have reported."""
_POLL_FIRST_S, _POLL_MAX_S = 0.25, 2.0
"""Seconds before the first question to the engine whether its receive still runs, and the most
between two of them: with async scheduling such a call drains the batches in flight."""
_CLOSING = {"start": "start_weight_update", "finish": "finish_weight_update"}
"""What a `StaleRound` may ask for."""


class WeightSyncClient(Protocol):
    """vLLM's four methods; anything that has them is an engine to us (vLLM's own Protocol, 0.27+)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass(frozen=True)
class Stages:
    """Seconds that the stages of one round took on one engine.

    Args:
        start: The call that opens the round.
        wire: From the first byte asked for until every worker had all of them.
        verify: Until every rank had agreed that it has.
        load: The commit: the only time during which this engine could not generate.
    """

    start: float
    wire: float
    verify: float
    load: float


class EngineLink:
    """One engine and what its workers have been told.

    Args:
        client: The engine's four methods, and optionally ``world_size() -> int``.
        trainer: The trainer's side of the backend.
        name: Names the engine in errors.
    """

    def __init__(
        self, client: WeightSyncClient, trainer: TrainerWeightTransferEngine, name: str
    ) -> None:
        self.client = client
        self.name = name
        self.torn = False
        self._trainer = trainer
        self._known = -1
        self._workers: int | None = None

    def connect(self, deadline: Deadline) -> None:
        """Connect the engine's workers to the trainer, closing what an earlier trainer left open."""
        with _serving(self._trainer):
            info = self._trainer.describe(deadline)
            try:
                self._call("init_weight_transfer_engine", info.to_wire())
            except StaleRound as stale:
                self._close(*str(stale.expected).split(","))
                self._call("init_weight_transfer_engine", info.to_wire())
        self._known = self._trainer.generation
        world_size = getattr(self.client, "world_size", None)
        self._workers = int(world_size()) if callable(world_size) else None

    def deliver(self, version: int, deadline: Deadline) -> Stages:
        """One round: start, open, wait, seal, finish.

        After an error the engine has its old weights, unless :attr:`torn`, or unless it was the
        answer to the seal that got lost: the finish that closes the round then commits it.
        """
        trainer = self._trainer
        began = time.perf_counter()
        # The trainer serves until the round is closed, a failed one too: with UCX over TCP a reader
        # that goes away can abort an owner that does not poll.
        with _serving(trainer) as serving:
            self._call("start_weight_update")
            started = time.perf_counter()
            try:
                generation = trainer.generation
                self._update("open", deadline)
                self._await_delivery(serving, deadline)
                delivered = time.perf_counter()
                self._update("seal", deadline)
                self._known = generation
            except BaseException:
                # vLLM has cleared its flag on the rank that raised and on no other; this clears the
                # others, and raises on that one rank, which keeps the replies in step.
                self._close("finish")
                raise
            sealed = time.perf_counter()
            try:
                self._call("finish_weight_update", str(version))
            except BaseException:
                self.torn = True
                self._close("start", "finish")
                raise
        self.torn = False
        done = time.perf_counter()
        return Stages(started - began, delivered - started, sealed - delivered, done - sealed)

    def _await_delivery(self, serving: _Serving, deadline: Deadline) -> None:
        """Until every worker has reported, or the engine says that it failed.

        Without a known number of workers the seal does the waiting.
        """
        interval = _POLL_FIRST_S
        next_poll = time.monotonic() + interval
        while self._workers is not None and self._trainer.delivered() < self._workers:
            serving.check()
            deadline.check(
                "Not all workers have received the weights",
                where=self.name,
                got=f"{self._trainer.delivered()} of {self._workers} workers",
            )
            if time.monotonic() >= next_poll:
                self._update("poll", deadline)
                interval = min(2 * interval, _POLL_MAX_S)
                next_poll = time.monotonic() + interval
            serving.wait(_DELIVERED_S)

    def _update(self, op: Any, deadline: Deadline) -> None:
        info = self._trainer.update_info(op, deadline, known=self._known)
        self._call("update_weights", info.to_wire())

    def _close(self, *calls: str) -> None:
        """Make the calls that clear vLLM's flag on all ranks; see docs/decisions.md."""
        for call in calls:
            if call in _CLOSING:
                self._quietly(_CLOSING[call])

    def _quietly(self, method: str) -> None:
        # vLLM's own gate may refuse it; the error that led here is the one to report.
        with suppress(WeightTransferError):
            self._call(method)

    def _call(self, method: str, *args: Any) -> None:
        function: Callable[..., Any] = getattr(self.client, method)
        try:
            function(*args)
        except WeightTransferError:
            raise
        except Exception as error:
            raise from_text(str(error), where=f"{method} of {self.name}") from error


class _Serving:
    """The trainer's part of a transfer, on a thread."""

    def __init__(self, trainer: TrainerWeightTransferEngine) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._main, name="vllm-wt-serve", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        try:
            self._trainer.serve(self._stop)
        except Exception as error:
            self._error = error

    def wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if isinstance(self._error, WeightTransferError):
            raise self._error
        if self._error is not None:
            raise TransportError(f"The trainer's side failed: {self._error}") from self._error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)


_JOIN_S = 10.0
"""Seconds a serving thread may take to notice that it should stop."""


@contextmanager
def _serving(trainer: TrainerWeightTransferEngine) -> Iterator[_Serving]:
    serving = _Serving(trainer)
    try:
        yield serving
    finally:
        serving.stop()
