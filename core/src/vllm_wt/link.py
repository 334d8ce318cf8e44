"""One engine, from the trainer's side: its calls, and what is known of it."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm_wt.bridge.register import names_in_vllm
from vllm_wt.caller import Caller
from vllm_wt.clients.protocol import Answer, WeightSyncClient
from vllm_wt.deadline import MAX_S, Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import (
    Aborted,
    EngineError,
    InvalidInfo,
    NotPaused,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    UnsupportedVllm,
    WeightTransferError,
    WrongOrder,
    from_text,
)
from vllm_wt.info import InitInfo, Op, UpdateInfo, seconds_left
from vllm_wt.pausing import USUAL, Pausing
from vllm_wt.reports import WorkerReport, decoded

logger = logging.getLogger(__name__)

_SENT_S = 0.0001
"""Seconds that it takes to send a call from another thread."""
_LISTEN_S = 0.001
"""Seconds to listen to the workers between two looks whether the engine has answered first."""


@dataclass(frozen=True)
class Stages:
    """Seconds that the stages of one round took on one engine.

    Args:
        start: The call that opens the round.
        wire: From the first byte asked for until every worker had all of them. What is counted are
            the workers of all engines: with several, it ends for each when all have.
        verify: Until every rank of this engine had agreed that it has; 0 where one call did it all,
            which counts it as ``wire``, and what the call itself took as ``start``.
        load: The commit. An engine that is not paused cannot generate during this alone.
        confirm: The workers' word that they hold this version.
        stop: Pausing it; 0 without a pause.
        resume: Letting it go on; 0 without a pause.
    """

    start: float
    wire: float
    verify: float
    load: float
    confirm: float
    stop: float = 0.0
    resume: float = 0.0


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
        self.paused = False
        """Whether this session has paused it and not let it go on since."""
        self.streams = False
        """Whether it has said that it loads while it receives, and so must be paused before."""
        self.whole: bool | None = None
        """Whether its weights are those of one version; None if that is not known."""
        address = getattr(client, "address", None)
        self.title = f"{name} ({address})" if address else name
        self.caller = Caller(f"vllm-wt-{name}")
        """Makes its calls where those of other engines are made at the same time."""
        self.lost: WeightTransferError | None = None
        """Why its last call was not answered, if it was not: then it has no part in pushes that go on
        without who fails."""
        self._trainer = trainer
        self._known = self._told = -1
        self.workers: int | None = None
        self._held: UpdateInfo | None = None
        self._in_doubt = False
        """Whether a round has begun and not come to a good end: its workers may connect anew."""
        self._mixed = -1
        """Ticket of a commit during which the trainer's memory has changed; the engine knows nothing
        of that."""
        self._attempted: UpdateInfo | None = None
        self._answer: Answer | None = None
        """That of a round that was asked for ahead."""
        self._replaced = False
        self._pauses = all(callable(getattr(client, call, None)) for call in ("pause", "resume"))
        self._open = False
        self._others = False
        """Whether somebody else had paused it when it was last looked at."""
        self.begin()

    def begin(self, pausing: Pausing = USUAL) -> None:
        """A new round, of which nothing has happened yet.

        Raises:
            InvalidInfo: The client cannot pause the engine like that.
        """
        self._pausing = pausing
        if self._pauses and pausing.arguments:
            self._require_pause(pausing)
        self._idle = self.in_process
        self._has_forgotten = False
        self._seconds = dict.fromkeys((field.name for field in fields(Stages)), 0.0)
        self._asked = 0.0

    @property
    def version(self) -> int | None:
        """What the engine has committed of this session, as far as is known."""
        return self._held.version if self._held is not None and self._held.ticket else None

    @property
    def in_process(self) -> bool:
        """Whether its calls are those of an object that only one thread may use."""
        return getattr(self.client, "idle_between_calls", False) is True

    @property
    def stages(self) -> Stages:
        return Stages(**self._seconds)

    # -- the steps of a round ----------------------------------------------------------------------

    def forget_first(self) -> None:
        """Have an engine that computes nothing within the round throw away what it has computed; others
        do when they are paused, or by :meth:`forget`."""
        if self._idle:
            self._forget(False)

    def forget(self) -> None:
        """Have it throw away what the old weights have computed, if it has not, nor is to keep it."""
        self._forget()

    def _forget(self, *at_once: bool) -> None:
        if self._pausing.kv == "recompute" and not self._has_forgotten:
            self._has_forgotten = True
            self._optional("reset_caches", *at_once)

    def connect(self, info: InitInfo, deadline: Deadline) -> None:
        """Connect the engine's workers to the trainer; a round that another left open is given up.

        If that one had paused the engine for it, the engine goes on, unless it is torn.

        Args:
            info: What the trainer says of itself; it serves meanwhile.
            deadline: Of the whole.
        """
        with suppress(WeightTransferError):
            self.paused = self._left_paused(deadline)
        self._call("init_weight_transfer_engine", info.to_wire())
        self._known = self._trainer.generation
        self.workers = self._world_size()
        self._attempted = self._held = replace(self._info("confirm", deadline), ticket=0, version=0)
        self.ask(deadline)
        self.leave()

    def _left_paused(self, deadline: Deadline) -> bool:
        """Whether a trainer has ended within a round for which the engine is paused."""
        return self.is_paused() and any(
            worker.state != "idle" or worker.torn for worker in self.reports(deadline)
        )

    def start(self, deadline: Deadline) -> None:
        self._open = True
        with self._timed("start"):
            try:
                self._call("start_weight_update")
            except Superseded:
                raise
            except WrongOrder:
                # A round was left open: by a call of ours that got lost, or by a trainer that was
                # stopped, has since been replaced and goes on. An abort ends rounds of this session
                # only.
                self._update(self._info("abort", deadline))
                self._call("start_weight_update")

    def open(self, deadline: Deadline) -> None:
        """The workers begin to receive; an engine that streams is paused for it.

        Raises:
            NotPaused: It streams, and cannot be paused.
        """
        try:
            self._begin_receive(deadline)
        except NotPaused as error:
            if self._idle:
                raise
            self.streams = True
            if not self.pause():
                if self._pausing.mode is None:
                    error.cure = (
                        'push with pause="keep"; or let the worker have room for a whole update'
                    )
                    raise
                error.cure = (
                    'let the worker have room for a whole update: staging="device" or "host"; '
                    "or give a client that has pause() and resume()"
                )
                raise
            self._begin_receive(deadline)  # the refusal has left the round as it was

    def _begin_receive(self, deadline: Deadline) -> None:
        self._in_doubt = True
        self._told = self._trainer.generation
        info = replace(self._info("open", deadline), paused=self._idle)
        if self._idle:
            self.whole = None  # it may load what it receives at once, whether we know that or not
        self._asked = time.perf_counter()
        self._update(info)

    def poll(self, deadline: Deadline) -> None:
        """Raises what the engine's receive failed with, if it did."""
        self._update(self._info("poll", deadline))

    def received(self) -> None:
        """The workers have everything."""
        self._seconds["wire"] = time.perf_counter() - self._asked

    def seal(self, deadline: Deadline) -> None:
        with self._timed("verify"):
            self._update(self._info("seal", deadline))
        self._known = self._told

    def commit(self, version: int, deadline: Deadline) -> None:
        """Finish and confirm.

        After an error the engine has its old weights, unless just the answer got lost, or the commit
        failed in the middle: :meth:`ask` tells.
        """
        self._open = False
        self._attempted = self._info("confirm", deadline)
        self.whole = None
        with self._timed("load"):
            try:
                self._call("finish_weight_update", str(version))
            except WeightTransferError as error:
                self._require_committed(error, deadline)
                return
        with self._timed("confirm"):
            self._confirm(self._attempted, deadline)
        self._require_kept()
        self._in_doubt = False

    @property
    def at_once(self) -> bool:
        """Whether a round can be one call."""
        return self._idle and callable(getattr(self.client, "run_round", None))

    @property
    def knows_where(self) -> bool:
        """Whether its workers have been told where the weights are."""
        return self._known == self._trainer.generation and not self._in_doubt

    def run_round(self, version: int, deadline: Deadline) -> bool:
        """The whole round in one call; False where the engine can't, which has done nothing then.

        After an error the engine has its old weights, unless just the answer got lost, or the commit
        failed in the middle: :meth:`ask` tells.
        """
        info = self._attempt_round(deadline)
        return self._end_round(
            lambda: self._call("run_round", info.to_wire(), str(version)), version, deadline
        )

    def ask_round(self, version: int, deadline: Deadline) -> bool:
        """Begin such a call for a version that is yet to be published; whether that could be done."""
        if not callable(getattr(self.client, "ask_round", None)):
            return False
        info = self._attempt_round(deadline)
        self._answer = self._call("ask_round", info.to_wire(), str(version))
        if self._answer is None:
            return False
        # It is on its way as soon as its thread has had the interpreter, which we would keep busy.
        self._made("run_round", self._answer.has_come, _SENT_S)
        return True

    def end_round(self, version: int, deadline: Deadline) -> bool:
        """Wait for the end of the call that was begun, as of :meth:`run_round`."""
        try:
            has_committed = self._has_heard()
        except WeightTransferError as error:
            self._answer = None
            self._require_committed(error, deadline)
            return True
        if not has_committed:
            return self._end_round(self._awaited, version, deadline)
        self._answer = None
        self._holds_attempted()
        self._require_kept()
        self._in_doubt = False
        return True

    def _has_heard(self) -> bool:
        """Wait until all workers have said that they have committed; False if the answer came first, or
        is what counts.

        It comes later, by the time that it takes to wake the threads of vLLM that it passes.
        """
        assert self._answer is not None
        workers, seconds = self.workers, self._seconds
        if workers is None or getattr(self.client, "may_leave", False) is not True:
            return False  # nor need anybody listen
        while not self._made("run_round", self._answer.has_come, 0.0):
            has_committed = self._trainer.committed(_LISTEN_S) >= workers
            took = time.perf_counter() - self._asked
            if not seconds["wire"] and self._trainer.delivered() >= workers:
                seconds["wire"] = took
            if has_committed:
                seconds["load"] = took - seconds["wire"]
                return True
        return False

    def let_end(self, seconds: float) -> None:
        """Give the call that was begun so long to end by itself."""
        if self._answer is not None:
            with suppress(Exception):  # of which the next call hears
                self._answer.has_come(seconds)

    def drop_round(self) -> None:
        """Wait for the end of the call that was begun, whose attempt was withdrawn. It may have been
        interrupted while it was made: then the next call waits."""
        if self._answer is not None:
            with suppress(WeightTransferError):
                self._awaited()

    def _awaited(self) -> Any:
        answer, self._answer = self._answer, None
        assert answer is not None
        return self._made("run_round", answer.result)

    def _attempt_round(self, deadline: Deadline) -> UpdateInfo:
        self._told = self._trainer.generation
        self._in_doubt = True
        info = self._whole_info(deadline)
        self._attempted = self._info("confirm", deadline)
        self.whole = None
        self._asked = time.perf_counter()
        return info

    def _whole_info(self, deadline: Deadline) -> UpdateInfo:
        return replace(self._info("all", deadline), paused=True)

    def _end_round(self, call: Callable[[], Any], version: int, deadline: Deadline) -> bool:
        try:
            told = self._made_at_once(call, version, deadline)
        except WeightTransferError as error:
            self._require_committed(error, deadline)
            return True
        if told is None:
            return False
        took = time.perf_counter() - self._asked
        assert self._attempted is not None
        if isinstance(told, list) and told and all(isinstance(each, dict) for each in told):
            self._holds_attempted()
            for stage in ("wire", "load"):
                self._seconds[stage] = min(took, max(_seconds(each, stage) for each in told))
        else:  # not every worker says that it has done it
            self._known = self._told
            self._confirm(self._attempted, deadline)
        self._seconds["start"] = max(0.0, took - self._seconds["wire"] - self._seconds["load"])
        self._require_kept()
        self._in_doubt = False
        return True

    def _holds_attempted(self) -> None:
        """All workers say so."""
        self._known = self._told
        self.torn, self.whole, self._held = False, True, self._attempted

    def _made_at_once(self, call: Callable[[], Any], version: int, deadline: Deadline) -> Any:
        try:
            return call()
        except Superseded:
            raise
        except WrongOrder:  # a round was left open, as in `start`
            self._update(self._info("abort", deadline))
            return self._call("run_round", self._whole_info(deadline).to_wire(), str(version))

    def _require_committed(self, error: WeightTransferError, deadline: Deadline) -> None:
        """Raise ``error``, unless the engine holds what was attempted all the same."""
        self.torn = self.torn or isinstance(error, TornModel)
        if self.lost is not None:
            raise error
        with suppress(WeightTransferError):
            self.ask(deadline)
        if self.torn or self._held is not self._attempted:
            raise error
        logger.warning("vllm-wt: %s has committed, though it said: %s", self.title, error)

    def _require_kept(self) -> None:
        try:
            self._trainer.require_kept()
        except WeightTransferError as error:
            error.engine = error.engine or self.title
            assert self._attempted is not None
            self._mixed = self._attempted.ticket
            self.torn, self.whole = True, False
            raise

    def give_up(self, deadline: Deadline, *, asks: bool = False) -> Superseded | None:
        """End a round that failed, if it is still open; Superseded if it is another trainer's by now.

        The failure may be just an answer that was lost: a seal that we have not heard of is never
        committed.

        Args:
            deadline: Of the round.
            asks: Whether to call an engine, too, that has not answered its last call.
        """
        if not self._open:
            return None
        self._open = False
        if (self.lost is not None and not asks) or self._replaced:
            return None  # start gives it up the next time
        try:
            self._update(self._info("abort", deadline))
        except Superseded as superseded:
            return superseded
        except WeightTransferError:
            logger.warning("vllm-wt: %s could not be told to give the round up", self.title)
        return None

    # -- pause -------------------------------------------------------------------------------------

    def pause(self) -> bool:
        """Pause it if that is possible; whether no forward pass can run until the round has ended.

        One that was paused before by somebody else stays so after the round. A torn one that is
        paused was left so by a push, of another session maybe: its new weights let it go on.
        """
        if self._is_to_be_paused:
            with self._timed("stop"):
                self._pause()
        return self._idle

    def pause_first(self, deadline: Deadline) -> None:
        """:meth:`pause` before the round has begun.

        Raises:
            Superseded: The engine is another trainer's by now, who would find it paused.
        """
        if self._is_to_be_paused:
            with suppress(Aborted):
                self.ask(deadline)
        self.pause()

    @property
    def _is_to_be_paused(self) -> bool:
        return not self._idle and self._pauses and self._pausing.mode is not None

    def _require_pause(self, pausing: Pausing) -> None:
        pause = self.client.pause  # type: ignore[attr-defined]
        try:
            inspect.signature(pause).bind(*pausing.arguments)
        except TypeError:
            raise InvalidInfo(
                "This engine's client can pause in one way only",
                engine=self.title,
                where="pause",
                expected="a client with pause(mode, clear_cache)",
                got=f"pause{inspect.signature(pause)}",
                cure="leave out pause and kv, or use a client of vllm_wt.clients",
            ) from None

    def _pause(self) -> None:
        paused = not self.paused and bool(self._optional("is_paused"))
        # A torn engine was left so by a push, unless we have seen that the pause is somebody else's.
        others = self._others = paused and (self._others or not self.torn)
        # First: vLLM is paused even if it says that it could not.
        former, self.paused = self.paused, not others
        try:
            self._call("pause", *self._pausing.arguments)
        except UnsupportedVllm as error:
            self.paused, self._pauses = former, False
            logger.info("vllm-wt: %s cannot be paused: %s", self.title, error)
            return
        self._idle = self._has_forgotten = True
        if others:
            logger.warning("vllm-wt: %s was paused before the push, and stays so", self.title)

    def is_paused(self) -> bool:
        """Whether it is paused, by whomever, as far as its client can tell."""
        return self.paused or bool(self._optional("is_paused"))

    def resume(self) -> None:
        """Let it go on, if this session has paused it."""
        if self.paused:
            with self._timed("resume"):
                self._call("resume")
            self.paused = False

    def let_go(self, deadline: Deadline) -> None:
        """After a failure: let it go on if its weights are of one version, else it stays paused."""
        if self.whole is None and (self.paused or self._idle):
            with suppress(WeightTransferError):
                self.ask(deadline)
        if self.torn and not self._idle and self._pauses:
            with suppress(
                WeightTransferError
            ):  # it was not to be paused, and must not generate now
                self._pause()
        self.leave()

    def leave(self) -> None:
        """Let it go on if its weights are known to be of one version; never raises.

        One that is another trainer's by now is not touched: that one may have paused it, and load.
        """
        if self.whole and not self._replaced:
            try:
                self.resume()
            except WeightTransferError as error:
                logger.warning("vllm-wt: %s did not resume: %s", self.title, error)

    # -- what it holds -----------------------------------------------------------------------------

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
            logger.warning("vllm-wt: %s is torn: %s", self.title, error)

    def reports(self, deadline: Deadline) -> tuple[WorkerReport, ...]:
        """What each worker says of itself; empty where the client or the engine does not tell.

        Args:
            deadline: Nothing is asked after it; an answer has the limits of the client.

        Raises:
            Timeout: The deadline has passed, or no answer came within the client's limits.
            CorruptTransfer: The answer is no list of reports.
            WeightTransferError: The engine failed, or a worker could not make its report.
        """
        deadline.check("There is no time left to ask the workers", where="reports")
        # Workers answer this whoever their trainer is: it is no word on a round, nor on whose they are.
        lost, replaced = self.lost, self._replaced
        try:
            return decoded(self._optional("reports"), where="reports")
        except WeightTransferError as error:
            error.engine = self.title
            raise
        finally:
            self.lost, self._replaced = lost, replaced

    def _confirm(self, info: UpdateInfo, deadline: Deadline) -> None:
        try:
            self._update(replace(info, deadline_s=seconds_left(deadline)))
        except TornModel:
            self.torn, self.whole = True, False
            raise
        self._held = info
        self.torn = info.ticket == self._mixed
        self.whole = not self.torn
        if self.torn:
            raise TornModel(
                "The trainer's memory has changed while the engine loaded it",
                where="confirm",
                engine=self.title,
                cure="do not generate; push a full update",
            )

    # -- calls -------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - began

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
                engine=self.title,
                expected="a number of 1 or more",
                got=repr(workers),
                cure="mend the client's world_size(), or leave it out",
            )
        return workers

    def require_backend(self) -> None:
        """vLLM's own refusal of what another backend's engine gets would come from every rank.

        Raises:
            InvalidInfo: The engine was not started for this backend.
        """
        configured = self._optional("configured_backend")
        names = names_in_vllm(self._trainer.backend)
        if configured is not None and configured not in names:
            raise InvalidInfo(
                "The engine was not started for this backend",
                engine=self.title,
                backend=self._trainer.backend,
                where="weight_transfer_config",
                expected=f"backend {' or '.join(map(repr, names))}",
                got=repr(configured) if configured else "no weight_transfer_config",
                cure=f'start it with weight_transfer_config={{"backend": "{names[0]}"}}',
            )

    def _optional(self, method: str, *args: Any) -> Any:
        """The answer of a method that a client need not have; None without."""
        there = callable(getattr(self.client, method, None))
        return self._call(method, *args) if there else None

    def _call(self, method: str, *args: Any) -> Any:
        function: Callable[..., Any] = getattr(self.client, method)
        return self._made(method, function, *args)

    def _made(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call of the client's; its error typed."""
        try:
            result = function(*args)
        except Exception as error:
            typed = (
                error
                if isinstance(error, WeightTransferError)
                else from_text(str(error) or repr(error), where=method)
            )
            typed.engine = self.title
            self.lost = typed if isinstance(typed, (PeerDead, Timeout)) else None
            self._replaced = isinstance(typed, Superseded)
            if typed is error:
                raise
            raise typed from error
        self.lost, self._replaced = None, False
        return result


def _seconds(told: dict[str, Any], stage: str) -> float:
    """What a worker says that a stage took; 0 where it says nothing that makes sense."""
    seconds = told.get(stage)
    return seconds if isinstance(seconds, float) and 0 <= seconds < MAX_S else 0.0
