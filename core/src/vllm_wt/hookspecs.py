"""The hooks of the pluggy project ``vllm_wt``. Import-light."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from vllm_wt.errors import WeightTransferError
    from vllm_wt.results import PushResult
    from vllm_wt.spec import BackendSpec

PROJECT = "vllm_wt"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def vllm_wt_backend() -> BackendSpec:  # type: ignore[empty-body]
    """Describe the backend that this module provides."""


@hookspec
def vllm_wt_round_started(version: int) -> None:
    """A push of ``version`` begins (trainer process)."""


@hookspec
def vllm_wt_round_finished(stats: PushResult) -> None:
    """A push has been committed on every engine (trainer process)."""


@hookspec
def vllm_wt_round_failed(version: int, error: WeightTransferError) -> None:
    """A push has failed (trainer process)."""
