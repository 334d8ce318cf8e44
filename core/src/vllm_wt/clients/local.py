"""An engine in this process: vLLM's ``LLM``, or ``AsyncLLM`` on a running event loop.

vLLM never answers a call in which its engine's process dies, so every wait here looks after that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_wt.caller import Caller, has_ended
from vllm_wt.clients.limits import call_limit_s
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.errors import (
    EngineError,
    InvalidInfo,
    PeerDead,
    Timeout,
    UnsupportedVllm,
    WeightTransferError,
    WrongOrder,
    from_text,
)
from vllm_wt.methods import REPORT, ROUND
from vllm_wt.pausing import PauseMode
from vllm_wt.reports import can_report, report_list

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

_SLACK_S = 60.0
"""Seconds a call may take beyond the deadline of what it asks for, which the worker keeps itself."""
_CALL_S = 300.0
"""Seconds that a call without a deadline of its own may take: with start and finish, vLLM waits for
the step in progress, and finish commits the weights."""
_LOOK_S = 0.25
"""Seconds between two looks at whether an engine that has not answered lives."""


class LocalClient:
    """A ``vllm.LLM``. Its calls block, and come back in the order they were made.

    It has no pause, and needs none: an ``LLM`` generates while it is called, and takes one call at a
    time.

    The four methods of a round pass on what vLLM raises, for `WeightSync` to type. Two failures are
    typed here: :class:`~vllm_wt.errors.PeerDead` when the engine has died, and
    :class:`~vllm_wt.errors.Timeout` when it does not answer.

    Args:
        llm: An engine started with ``weight_transfer_config``.
        call_s: Seconds that a call without a deadline of its own may take, such as start and finish.
        slack_s: Seconds that init and update may take beyond the ``deadline_s`` of their info,
            which the workers keep themselves.
    """

    idle_between_calls = True
    """See `vllm_wt.clients.protocol.WeightSyncClient`."""

    def __init__(self, llm: LLM, *, call_s: float = _CALL_S, slack_s: float = _SLACK_S) -> None:
        self._llm = llm
        self._call_s = call_s
        self._slack_s = slack_s
        self._takes_version = _takes_version(llm)
        self._caller = Caller("vllm-wt-llm")
        self._is_to_reset = False
        self._last: Answer | None = None
        """Of the last call, whether anybody has waited for it or not."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(
            "init_weight_transfer_engine",
            lambda: self._llm.init_weight_transfer_engine({"init_info": init_info}),
            call_limit_s(init_info, default_s=INIT_S, slack_s=self._slack_s),
        )

    def start_weight_update(self) -> None:
        self._call("start_weight_update", self._llm.start_weight_update, self._call_s)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call(
            "update_weights",
            lambda: self._llm.update_weights({"update_info": update_info}),
            call_limit_s(update_info, default_s=ROUND_S, slack_s=self._slack_s),
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        given = weight_version is not None and self._takes_version
        arguments = (weight_version,) if given else ()
        self._call(
            "finish_weight_update",
            lambda: self._llm.finish_weight_update(*arguments),
            self._call_s,
        )

    def run_round(
        self, update_info: dict[str, Any], weight_version: str
    ) -> list[dict[str, float] | None] | None:
        """See `vllm_wt.clients.protocol.WeightSyncClient`."""
        call = self._round(update_info, weight_version)
        if call is None:
            return None
        limit = call_limit_s(update_info, default_s=ROUND_S, slack_s=self._slack_s)
        told: list[dict[str, float] | None] = self._call("run_round", call, limit)
        return told

    def ask_round(self, update_info: dict[str, Any], weight_version: str) -> Answer | None:
        """See `vllm_wt.clients.protocol.WeightSyncClient`."""
        call = self._round(update_info, weight_version)
        if call is None or self._resources is None:
            return None
        limit = call_limit_s(update_info, default_s=ROUND_S, slack_s=self._slack_s)
        return self._begun("run_round", call, limit)

    @property
    def may_leave(self) -> bool:
        """See `vllm_wt.clients.protocol.WeightSyncClient`.

        Not where vLLM keeps a version, which takes a call behind the round's: whoever has the `LLM`
        would make calls of their own by then, and it takes one at a time.
        """
        return self._set_version is None

    @property
    def _set_version(self) -> Callable[[str], None] | None:
        """Since vLLM 0.27; a call to the engine."""
        set_version: Callable[[str], None] | None = getattr(
            self._llm.llm_engine, "set_weight_version", None
        )
        return set_version

    def _round(self, update_info: dict[str, Any], weight_version: str) -> Callable[[], Any] | None:
        """A round in one call; None if this engine can't."""
        set_version = self._set_version
        if not can_report(self.configured_backend()) or (
            self._takes_version and set_version is None
        ):
            return None

        def call() -> Any:
            told = self._llm.collective_rpc(ROUND, kwargs={"update_info": update_info})
            if set_version is not None:  # as the LLM's own finish does
                set_version(weight_version)
            return list(told)

        return call

    def reset_caches(self, at_once: bool = True) -> None:
        """Throw away keys and values, and outputs of encoders; requests are computed again.

        Args:
            at_once: If not, the next call begins with it, at no time of its own.
        """
        if at_once:
            self._call("reset_caches", lambda: _reset(self._llm), self._call_s)
        else:
            self._is_to_reset = True

    def world_size(self) -> int:
        """Workers that receive weights: tensor times pipeline parallel."""
        with _typed("world_size"):
            return int(self._llm.llm_engine.vllm_config.parallel_config.world_size)

    def configured_backend(self) -> str:
        """See `vllm_wt.clients.protocol.WeightSyncClient`."""
        with _typed("configured_backend"):
            return _backend_of(self._llm.llm_engine.vllm_config)

    def weight_version(self) -> str | None:
        """The version that vLLM itself reports; None before vLLM 0.27, which keeps none.

        Raises:
            WeightTransferError: The engine failed, typed.
        """
        ask = getattr(self._llm, "get_weight_version", None)
        with _typed("weight_version"):
            return None if ask is None else str(self._call("weight_version", ask, self._call_s))

    def reports(self) -> list[dict[str, Any]] | None:
        """What each worker says of itself; None where its engine is none of ours.

        Raises:
            WeightTransferError: The engine failed, typed.
        """
        if not can_report(self.configured_backend()):
            return None
        with _typed("reports"):
            told = self._call("reports", lambda: self._llm.collective_rpc(REPORT), self._call_s)
        return report_list(told, where="reports")

    @property
    def _resources(self) -> Any:
        """Of the engine core's process; None of one within this process, which cannot die by itself,
        and whose GPU's context belongs to the caller's thread."""
        return getattr(self._llm.llm_engine.engine_core, "resources", None)

    def _call(self, where: str, function: Callable[[], Any], seconds: float) -> Any:
        if self._resources is None:
            with _alive(where):
                return self._resetting(function)()
        return self._begun(where, function, seconds).result()

    def _resetting(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The call, after the caches are reset if they are to be."""
        if not self._is_to_reset:
            return function
        self._is_to_reset = False

        def both() -> Any:
            _reset(self._llm)
            return function()

        return both

    def _begun(self, where: str, function: Callable[[], Any], seconds: float) -> Answer:
        """A call on a thread of its own, when the one before has come to its end, or its time is over:
        that may have been interrupted, or left, and an `LLM` whose calls overlap aborts the process.

        Raises:
            PeerDead: The engine has died.
            Timeout: It does not answer the one before either.
        """
        resources = self._resources
        deadline = Deadline(seconds)
        while self._last is not None and not self._last.is_over(min(_LOOK_S, deadline.remaining())):
            _check_dead(resources, where)
            if deadline.expired:
                raise _unanswered(where, seconds)
        future = self._caller(self._resetting(function))
        self._last = Answer(future, where, seconds, lambda: _check_dead(resources, where))
        return self._last


class AsyncLocalClient:
    """A ``vllm.AsyncLLM``, for a `WeightSync` that runs on a thread while the loop goes on serving.

    .. code-block:: python

        client = AsyncLocalClient(engine, asyncio.get_running_loop())
        sync = await asyncio.to_thread(
            WeightSync.connect, client, backend="rdma", source=model
        )
        await asyncio.to_thread(sync.push, version)

    Every method blocks its thread until the loop has run the call, and raises errors of
    `vllm_wt.errors` only: :class:`~vllm_wt.errors.PeerDead` when the engine or its loop has ended,
    :class:`~vllm_wt.errors.Timeout` when it does not answer, and
    :class:`~vllm_wt.errors.WrongOrder` from the loop's own thread, which would wait for itself.

    Args:
        engine: An engine started with ``weight_transfer_config``.
        loop: The event loop that it lives on.
        call_s: Seconds that a call without a deadline of its own may take, such as start and finish.
        slack_s: Seconds that init and update may take beyond the ``deadline_s`` of their info,
            which the workers keep themselves.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        loop: asyncio.AbstractEventLoop,
        *,
        call_s: float = _CALL_S,
        slack_s: float = _SLACK_S,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._call_s = call_s
        self._slack_s = slack_s
        self._takes_version = _takes_version(engine)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        # The dataclass: AsyncLLM takes nothing else through vLLM 0.25.
        request = WeightTransferInitRequest(init_info=init_info)
        self._call(
            "init_weight_transfer_engine",
            lambda: self._engine.init_weight_transfer_engine(request),
            call_limit_s(init_info, default_s=INIT_S, slack_s=self._slack_s),
        )

    def start_weight_update(self) -> None:
        self._call("start_weight_update", self._engine.start_weight_update, self._call_s)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=update_info)
        self._call(
            "update_weights",
            lambda: self._engine.update_weights(request),
            call_limit_s(update_info, default_s=ROUND_S, slack_s=self._slack_s),
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        given = weight_version is not None and self._takes_version
        arguments = (weight_version,) if given else ()
        self._call(
            "finish_weight_update",
            lambda: self._engine.finish_weight_update(*arguments),
            self._call_s,
        )

    def world_size(self) -> int:
        """Workers that receive weights: tensor times pipeline times data parallel."""
        with _typed("world_size"):
            return int(self._engine.vllm_config.parallel_config.world_size_across_dp)

    def configured_backend(self) -> str:
        """See `vllm_wt.clients.protocol.WeightSyncClient`."""
        with _typed("configured_backend"):
            return _backend_of(self._engine.vllm_config)

    def weight_version(self) -> str | None:
        """The version that vLLM itself reports; None before vLLM 0.27, which keeps none."""
        ask = getattr(self._engine, "get_weight_version", None)
        return None if ask is None else str(self._call("weight_version", ask, self._call_s))

    def pause(self, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        """Stop generating. Harmless if it is paused already.

        Args:
            mode: What becomes of requests in flight; see `vllm_wt.pausing`.
            clear_cache: Whether keys and values are thrown away, of kept requests too.

        Raises:
            UnsupportedVllm: This release cannot keep them.
        """
        pause = getattr(self._engine, "pause_generation", None)
        if pause is None or "mode" not in inspect.signature(pause).parameters:
            raise UnsupportedVllm(
                "This vLLM cannot pause without losing requests",
                where="pause",
                expected="AsyncLLM.pause_generation(mode=...)",
                got="none" if pause is None else f"pause_generation{inspect.signature(pause)}",
                cure="use vLLM 0.25 or later",
            )
        self._call("pause", lambda: pause(mode=mode, clear_cache=clear_cache), self._call_s)

    def resume(self) -> None:
        """Go on generating, after a :meth:`pause`; harmless without."""
        self._call("resume", self._engine.resume_generation, self._call_s)

    def is_paused(self) -> bool | None:
        """Whether it is paused, by whomever; None where vLLM does not tell."""
        ask = getattr(self._engine, "is_paused", None)
        return None if ask is None else bool(self._call("is_paused", ask, self._call_s))

    def reset_caches(self) -> None:
        """Throw away keys and values, and outputs of encoders; requests are computed again."""
        arguments = _reset_arguments(self._engine.vllm_config)
        done = self._call(
            "reset_caches", lambda: self._engine.reset_prefix_cache(*arguments), self._call_s
        )
        _require_reset(done)
        if self._engine.vllm_config.model_config.is_multimodal_model:
            self._call("reset_caches", self._engine.reset_encoder_cache, self._call_s)

    def reports(self) -> list[dict[str, Any]] | None:
        """What each worker says of itself; None where its engine is none of ours.

        With data parallel, vLLM gives the answers of the first replica.
        """
        if not can_report(self.configured_backend()):
            return None
        ask = self._engine.collective_rpc
        told = self._call("reports", lambda: ask(REPORT), self._call_s)
        return report_list(told, where="reports")

    def _call(
        self, where: str, function: Callable[[], Coroutine[Any, Any, Any]], seconds: float
    ) -> Any:
        self._require_loop(where)
        coroutine = function()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # it was closed just now
            coroutine.close()
            raise _loop_ended(where) from error
        with _typed(where):
            answer = Answer(future, where, seconds, lambda: self._check_alive(where))
            try:
                return answer.result()
            finally:
                future.cancel()  # the coroutine, of which nobody hears any more

    def _check_alive(self, where: str) -> None:
        if self._loop.is_closed() or not self._loop.is_running():
            raise _loop_ended(where)
        _check_dead(self._engine.engine_core.resources, where)

    def _require_loop(self, where: str) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            raise WrongOrder(
                "This blocks the event loop that the engine needs to answer",
                where=where,
                cure="call WeightSync on a thread: await asyncio.to_thread(WeightSync.connect, client, "
                "...), and await asyncio.to_thread(sync.push, version)",
            )
        if self._loop.is_closed() or not self._loop.is_running():
            raise WrongOrder(
                "The engine's event loop does not run",
                where=where,
                expected="a running loop on another thread",
                got="a closed one" if self._loop.is_closed() else "one that is not running",
                cure="connect and push while the loop that serves the engine runs",
            )


class Answer:
    """That of a call under way: what it returns, or a typed error in time.

    Args:
        future: Of the call.
        where: Which call.
        seconds: That it may take.
        check: Raises once the engine is no more.
    """

    def __init__(
        self, future: Future[Any], where: str, seconds: float, check: Callable[[], None]
    ) -> None:
        self._future = future
        self._where = where
        self._deadline = Deadline(seconds)
        self._check = check

    def has_come(self, seconds: float = _LOOK_S) -> bool:
        """Whether it has, which is waited for.

        Args:
            seconds: At most.

        Raises:
            PeerDead: The engine has died.
            Timeout: The time of the call is over.
        """
        if has_ended(self._future, min(seconds, self._deadline.remaining())):
            return True
        self._check()
        if self._deadline.expired:
            raise _unanswered(self._where, self._deadline.seconds)
        return False

    def is_over(self, seconds: float) -> bool:
        """Whether it has come, or its time is over, which is waited for.

        Args:
            seconds: At most.
        """
        return has_ended(self._future, min(seconds, self._deadline.remaining())) or (
            self._deadline.expired
        )

    def result(self) -> Any:
        """What the call has returned.

        Raises:
            PeerDead, Timeout: As of `has_come`.
            Exception: What the call has raised.
        """
        while not self.has_come():
            pass
        try:
            with _alive(self._where):
                return self._future.result()
        except concurrent.futures.CancelledError:
            raise _loop_ended(self._where) from None  # by whoever ended the loop's tasks


def _unanswered(where: str, seconds: float) -> Timeout:
    return Timeout(
        "The engine did not answer",
        where=where,
        expected=f"within {seconds:g} s",
        cure="look for an engine that is stopped, or a blocked event loop",
    )


def _reset(llm: LLM) -> None:
    engine = llm.llm_engine
    _require_reset(engine.reset_prefix_cache(*_reset_arguments(engine.vllm_config)))
    if engine.vllm_config.model_config.is_multimodal_model:
        engine.engine_core.reset_encoder_cache()


def _reset_arguments(vllm_config: Any) -> tuple[bool, bool]:
    """Of ``reset_prefix_cache``: whether requests in flight are computed again, and whether a KV
    connector forgets, too."""
    return True, vllm_config.kv_transfer_config is not None


def _require_reset(done: Any) -> None:
    if not done:
        raise EngineError(
            "vLLM has not thrown away what its old weights have computed",
            where="reset_caches",
            expected="reset_prefix_cache() -> True",
            got=repr(done)[:200],
            cure="see its log; push again",
        )


def _takes_version(engine: Any) -> bool:
    """Whether vLLM keeps the version: since 0.27; before, only the session does.

    Raises:
        InvalidInfo: This is no engine.
    """
    finish = getattr(engine, "finish_weight_update", None)
    if not callable(finish):
        raise InvalidInfo(
            "This is no vLLM engine of 0.25 or later",
            where="engine",
            expected="an LLM, or an AsyncLLM, with finish_weight_update",
            got=type(engine).__name__,
            cure="give the engine itself; older releases of vLLM are not supported",
        )
    return bool(inspect.signature(finish).parameters)


def _backend_of(vllm_config: Any) -> str:
    config = vllm_config.weight_transfer_config
    return "" if config is None else str(config.backend)


def _check_dead(resources: Any, where: str) -> None:
    """Raise PeerDead once vLLM has noticed that its engine's process has ended."""
    if resources.engine_dead:
        raise _dead(where)


def _dead(where: str) -> PeerDead:
    return PeerDead(
        "vLLM's engine has died (EngineDeadError)",
        where=where,
        cure="read the engine's log for why, then start it and connect again",
    )


def _loop_ended(where: str) -> PeerDead:
    return PeerDead(
        "The engine's event loop ended during the call",
        where=where,
        cure="start the engine again, then connect again",
    )


@contextmanager
def _alive(where: str) -> Iterator[None]:
    """What says that vLLM's engine has died is a `PeerDead`; all else passes."""
    try:
        yield
    except Exception as error:
        # By name, since this must work without importing vllm.
        if any(cls.__name__ == "EngineDeadError" for cls in type(error).__mro__):
            raise _dead(where) from error
        raise


@contextmanager
def _typed(where: str) -> Iterator[None]:
    """All errors are of `vllm_wt.errors`."""
    try:
        with _alive(where):
            yield
    except WeightTransferError:
        raise
    except Exception as error:
        raise from_text(str(error) or type(error).__name__, where=where) from error
