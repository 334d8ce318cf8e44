"""Drives one engine through init and rounds, from the trainer's side."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm_wt.bridge.register import names_in_vllm
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import (
    Aborted,
    EngineError,
    InvalidInfo,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
    from_text,
)
from vllm_wt.info import Op, UpdateInfo, seconds_left

logger = logging.getLogger(__name__)

_DELIVERED_S = 0.001
"""Seconds between two looks at whether the workers have reported."""
_POLL_FIRST_S, _POLL_MAX_S = 0.25, 2.0
"""Seconds before the first question to the engine whether its receive still runs, and the most
between two of them: with async scheduling such a call drains the batches in flight."""


class WeightSyncClient(Protocol):
    """vLLM's four methods; anything that has them is an engine to us (vLLM's own Protocol, 0.27+).

    Optional, and asked where they are there:

    - ``world_size() -> int | None``: workers that receive weights; None if it can't be told.
    - ``weight_version() -> str | None``: the version that vLLM itself reports.
    - ``configured_backend() -> str | None``: the name that ``WeightTransferConfig`` was given, empty
      where the engine was started without, None if it can't be told.
    - ``address``: a text that names the engine in errors.
    """

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
        confirm: The workers' word that they hold this version.
    """

    start: float
    wire: float
    verify: float
    load: float
    confirm: float


class EngineLink:
    """One engine and what its workers have been told.

    Args:
        client: How to call the engine.
        trainer: The trainer's side of the backend.
        name: Names the engine in errors.
    """

    def __init__(
        self, client: WeightSyncClient, trainer: TrainerWeightTransferEngine, name: str
    ) -> None:
        self.client = client
        self.name = name
        self.torn = False
        address = getattr(client, "address", None)
        self._title = f"{name} ({address})" if address else name
        self._trainer = trainer
        self._known = -1
        self._workers: int | None = None
        self._held: UpdateInfo | None = None
        self._attempted: UpdateInfo | None = None
        self._answers = True

    @property
    def version(self) -> int | None:
        """What the engine has committed of this session, as far as is known."""
        return self._held.version if self._held is not None and self._held.ticket else None

    def connect(self, deadline: Deadline) -> None:
        """Connect the engine's workers to the trainer; a round that another left open is given up."""
        self._require_backend()
        with _serving(self._trainer) as serving, serving.blamed():
            with reading("connect"):
                info = self._trainer.describe(deadline)
            self._call("init_weight_transfer_engine", info.to_wire())
        self._known = self._trainer.generation
        self._workers = self._world_size()
        self._attempted = self._held = replace(self._info("confirm", deadline), ticket=0, version=0)
        self.ask(deadline)

    def deliver(self, version: int, deadline: Deadline) -> Stages:
        """One round: start, open, wait, seal, finish, confirm.

        After an error the engine has its old weights, unless just the answer to the commit got lost,
        or the commit failed in the middle: :meth:`ask` tells.
        """
        began = time.perf_counter()
        # The trainer serves until the round is closed, a failed one too: with UCX over TCP a reader
        # that goes away can abort an owner that does not poll.
        with _serving(self._trainer) as serving:
            try:
                with serving.blamed():
                    self._start(deadline)
                    started = time.perf_counter()
                    delivered = self._transfer(serving, deadline)
            except BaseException as error:
                self._give_up(error, deadline)
                raise
            sealed = time.perf_counter()
            committed = self._commit(version, deadline)
        done = time.perf_counter()
        return Stages(
            start=started - began,
            wire=delivered - started,
            verify=sealed - delivered,
            load=committed - sealed,
            confirm=done - committed,
        )

    def ask(self, deadline: Deadline) -> None:
        """Learn what the engine holds: :attr:`torn` and :attr:`version`.

        vLLM's own version is no proof of a commit: its finish sets it, whoever committed what.

        Raises:
            Aborted: Neither what was attempted last nor what it held before.
            WeightTransferError: It cannot be asked.
        """
        assert self._attempted is not None
        assert self._held is not None
        try:
            try:
                self._confirm(self._attempted, deadline)
            except Aborted:
                self._confirm(self._held, deadline)
        except TornModel as error:
            logger.warning("vllm-wt: %s is torn: %s", self._title, error)

    def _confirm(self, info: UpdateInfo, deadline: Deadline) -> None:
        try:
            self._update(replace(info, deadline_s=seconds_left(deadline)))
        except TornModel:
            self.torn = True
            raise
        self.torn, self._held = False, info

    def _start(self, deadline: Deadline) -> None:
        try:
            self._call("start_weight_update")
        except Superseded:
            raise
        except WrongOrder:
            # A round was left open: by a call of ours that got lost, or by a trainer that was
            # stopped, has since been replaced and goes on. An abort ends rounds of this session only.
            self._update(self._info("abort", deadline))
            self._call("start_weight_update")

    def _transfer(self, serving: _Serving, deadline: Deadline) -> float:
        """Open, wait and seal; the time at which every worker had all bytes."""
        generation = self._trainer.generation
        others = self._trainer.delivered()  # workers of the engines before this one
        self._update(self._info("open", deadline))
        self._await_delivery(serving, others, deadline)
        delivered = time.perf_counter()
        self._update(self._info("seal", deadline))
        self._known = generation
        return delivered

    def _give_up(self, error: BaseException, deadline: Deadline) -> None:
        """End a round that failed; ``error`` is the one to report.

        It may be just an answer that was lost: a seal that we have not heard of is never committed.
        """
        if not self._answers or isinstance(error, Superseded):
            return  # start gives it up the next time
        try:
            self._update(self._info("abort", deadline))
        except Superseded as superseded:
            raise superseded from error
        except WeightTransferError:
            logger.warning("vllm-wt: %s could not be told to give the round up", self._title)

    def _commit(self, version: int, deadline: Deadline) -> float:
        """Finish and confirm; the time of the commit's end."""
        self._attempted = self._info("confirm", deadline)
        try:
            self._call("finish_weight_update", str(version))
        except WeightTransferError as error:
            self.torn = self.torn or isinstance(error, TornModel)
            if not self._answers:
                raise
            with suppress(WeightTransferError):
                self.ask(deadline)
            if self.torn or self._held is not self._attempted:
                raise
            logger.warning("vllm-wt: %s has committed, though it said: %s", self._title, error)
            return time.perf_counter()
        committed = time.perf_counter()
        self._confirm(self._attempted, deadline)
        return committed

    def _await_delivery(self, serving: _Serving, others: int, deadline: Deadline) -> None:
        """Until every worker has reported, or the engine says that it failed.

        Without a known number of workers the seal does the waiting.
        """
        if self._workers is None:
            return
        interval = _POLL_FIRST_S
        next_poll = time.monotonic() + interval
        while (ready := self._trainer.delivered() - others) < self._workers:
            serving.check()
            deadline.check(
                f"Not all workers of {self._title} have received the weights",
                where="wire",
                got=f"{ready} of {self._workers} workers",
            )
            if time.monotonic() >= next_poll:
                self._update(self._info("poll", deadline))
                interval = min(2 * interval, _POLL_MAX_S)
                next_poll = time.monotonic() + interval
            serving.wait(_DELIVERED_S)

    def _info(self, op: Op, deadline: Deadline) -> UpdateInfo:
        return self._trainer.update_info(op, deadline, known=self._known)

    def _update(self, info: UpdateInfo) -> None:
        self._call("update_weights", info.to_wire())

    def _world_size(self) -> int | None:
        workers = self._optional("world_size")
        if workers is None:
            return None
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise EngineError(
                "The engine does not say how many workers it has",
                where="world_size",
                engine=self._title,
                expected="a number of 1 or more",
                got=repr(workers),
                cure="mend the client's world_size(), or leave it out",
            )
        return workers

    def _require_backend(self) -> None:
        """vLLM's own refusal of what another backend's engine gets would come from every rank."""
        configured = self._optional("configured_backend")
        names = names_in_vllm(self._trainer.backend)
        if configured is not None and configured not in names:
            raise InvalidInfo(
                "The engine was not started for this backend",
                engine=self._title,
                backend=self._trainer.backend,
                where="weight_transfer_config",
                expected=f"backend {' or '.join(map(repr, names))}",
                got=repr(configured) if configured else "no weight_transfer_config",
                cure=f'start it with weight_transfer_config={{"backend": "{names[0]}"}}',
            )

    def _optional(self, method: str) -> Any:
        """The answer of a method that a client need not have; None without."""
        return self._call(method) if callable(getattr(self.client, method, None)) else None

    def _call(self, method: str, *args: Any) -> Any:
        function: Callable[..., Any] = getattr(self.client, method)
        try:
            result = function(*args)
        except Exception as error:
            typed = (
                error
                if isinstance(error, WeightTransferError)
                else from_text(str(error) or repr(error), where=method)
            )
            typed.engine = self._title
            self._answers = not isinstance(typed, (PeerDead, Timeout))
            if typed is error:
                raise
            raise typed from error
        self._answers = True
        return result


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Around what reads the source, which is the user's own code and may raise anything."""
    try:
        yield
    except WeightTransferError:
        raise
    except Exception as error:
        raise TransportError(
            f"The weights could not be read: {type(error).__name__}: {error}",
            where=where,
            cure="see the cause, in the source or in the backend; no engine has heard of it",
        ) from error


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
