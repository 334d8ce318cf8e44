"""The trainer's own part in a round: its source is read, and its side serves on a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import TransportError, WeightTransferError
from vllm_wt.sources.gathering import gathers_within

_JOIN_S = 10.0
"""Seconds a serving thread may take to notice that it should stop."""


@contextmanager
def reading(where: str, deadline: Deadline) -> Iterator[None]:
    """Around what reads the source, which is the user's own code and may raise anything."""
    try:
        with gathers_within(deadline):
            yield
    except WeightTransferError:
        raise
    except Exception as error:
        raise TransportError(
            f"The weights could not be read: {type(error).__name__}: {error}",
            where=where,
            cure="see the cause, in the source or in the backend; no engine has taken new weights",
        ) from error


class Serving:
    """The trainer's part of a transfer, on a thread from :meth:`start` on."""

    def __init__(self, trainer: TrainerWeightTransferEngine) -> None:
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._main, name="vllm-wt-serve", daemon=True)

    def start(self) -> None:
        """Serve from now on, if it doesn't yet."""
        if self._thread.ident is None:
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
            raise TransportError(
                f"The trainer's side failed: {self._error}", cure="see the cause; connect again"
            ) from self._error

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What ended the thread is the cause of an error here, if anything did."""
        try:
            yield
        except WeightTransferError as error:
            try:
                self.check()
            except WeightTransferError as cause:
                raise cause from error
            raise

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)


@contextmanager
def serving(trainer: TrainerWeightTransferEngine) -> Iterator[Serving]:
    """The trainer's side serves from here to the end of the block."""
    part = Serving(trainer)
    part.start()
    try:
        yield part
    finally:
        part.stop()
