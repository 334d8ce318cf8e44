"""What an engine is to a session: vLLM's four methods, and what a client may have besides."""

from __future__ import annotations

from typing import Any, Protocol


class Answer(Protocol):
    """That of a call that was begun."""

    def has_come(self, seconds: float) -> bool:
        """Whether it has, which is waited for so long at most; raises what keeps it from coming."""

    def result(self) -> Any:
        """Wait for it; returns and raises what the call does."""


class WeightSyncClient(Protocol):
    """vLLM's four methods; anything that has them is an engine to us (vLLM's own Protocol, 0.27+).

    Optional, and asked where they are there:

    - ``world_size() -> int | None``: workers that receive weights; None if it can't be told.
    - ``weight_version() -> str | None``: the version that vLLM itself reports.
    - ``configured_backend() -> str | None``: the name that ``WeightTransferConfig`` was given, empty
      where the engine was started without, None if it can't be told.
    - ``pause(mode="keep", clear_cache=True) -> None`` and ``resume() -> None``: stop generating and go
      on; both harm nothing when called twice. They raise ``UnsupportedVllm`` where the engine cannot.
      Without them it is not paused. A ``pause()`` without arguments is one that keeps requests, and
      computes them again; what else `vllm_wt.pausing` has is then refused.
    - ``is_paused() -> bool | None``: None if it can't be told.
    - ``reset_caches() -> None``: throw away what was computed by the old weights, keys and values and
      outputs of encoders; requests in flight are computed again. Called after the commit where no
      pause has done it. Without it an engine that is not paused may answer from prefixes that the old
      weights have read. Of a client that is idle between calls ``reset_caches(at_once=False)`` is
      called, before the round: it may wait for the next call.
    - ``reports() -> list[dict[str, Any]] | None``: what each worker says of itself, by rank, as
      `vllm_wt.reports.WorkerReport` decodes it; None where it can't be asked. Of an engine with
      data parallel, the workers of one replica may be all that answer.
    - ``run_round(update_info, weight_version) -> list[dict[str, float] | None] | None``: start, update
      and finish in one call, for an engine that generates nothing meanwhile; from each worker the
      seconds of ``wire`` and ``load``. None if it can't be done: then nothing has been.
    - ``ask_round(update_info, weight_version) -> Answer | None``: the same, begun. None if that can't
      be: then nothing has been.
    - ``may_leave``: True if nobody need wait for the answer of one that was begun, once its workers
      have said that it is done; the client's next call does.
    - ``idle_between_calls``: True if no forward pass can run while the caller is inside ``push``.
    - ``address``: a text that names the engine in errors.
    - ``host``: the host that it is reached on; none if the engine is on this one.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
