"""Which of a backend's forms is in use on a worker: the session's, or vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from vllm_wt import registry
from vllm_wt.backends import native_engine_cls, worker_engine
from vllm_wt.engine import WorkerContext
from vllm_wt.loading.apply import ModelLoader
from vllm_wt.native_round import NativeRound
from vllm_wt.ranks import Ranks
from vllm_wt.round import WorkerRound
from vllm_wt.spec import Kind

Round: TypeAlias = WorkerRound | NativeRound


class Forms:
    """The round of each form that a backend has, of one worker and one model.

    Args:
        context: Names the backend.
        loader: Of the model.
        ranks: The workers of this vLLM engine.
        thread_context: Entered on threads of core's, to select the device.

    Raises:
        BackendUnavailable, PluginError: The backend is not installed, or broken.
    """

    def __init__(
        self,
        context: WorkerContext,
        loader: ModelLoader,
        ranks: Ranks,
        thread_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._session: WorkerRound | None = None
        self._native: NativeRound | None = None
        if registry.default().get(context.backend).spec.kind is not Kind.NATIVE:
            engine = worker_engine(context)
            self._session = WorkerRound(engine, loader, ranks, thread_context)
        if (native_cls := native_engine_cls(context.backend)) is not None:
            self._native = NativeRound(native_cls(context), loader, ranks, thread_context)
        current = self._session or self._native
        assert current is not None  # a spec names at least one
        self.current: Round = current
        """The one that was connected last."""

    def init(self, data: Mapping[str, Any]) -> None:
        """Connect in the form that the data is of; a backend with one form takes all data as that."""
        chosen = self._chosen(data)
        if chosen is not self.current:
            self.current.shutdown()
            chosen.torn = self.current.torn  # it is the model that is, whoever has loaded it
            self.current = chosen
        self.current.init(data)

    def _chosen(self, data: Mapping[str, Any]) -> Round:
        if self._session is None or self._native is None or not isinstance(data, Mapping):
            return self.current
        return self._session if "session" in data else self._native
