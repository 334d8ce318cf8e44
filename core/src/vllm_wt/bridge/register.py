"""Tells vLLM's factory about every discovered backend, by string path."""

from __future__ import annotations

import logging

from vllm_wt import registry

logger = logging.getLogger(__name__)

PREFIX = "wt_"
"""Every backend is registered under this prefix, and without it where vLLM leaves the name free."""


def register() -> None:
    """Register all backends. Idempotent; never raises, since that would end vLLM's process."""
    try:
        _register()
    except Exception:
        logger.exception("vllm-wt: no backend could be registered; see `vllm-wt doctor`")


def _register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    found = registry.default()
    for failure in found.failures:
        logger.warning(
            "vllm-wt: backend %r of %s is left out: %s. Cure: %s",
            failure.name,
            failure.distribution,
            failure.error,
            failure.cure,
        )
    for name in found.backends:
        for spelling in (PREFIX + name, name):
            if spelling not in Factory._registry:
                Factory.register_engine(spelling, "vllm_wt.bridge.worker", f"engine_{name}")


def names_in_vllm(backend: str) -> tuple[str, ...]:
    """The names under which an engine may have this backend, the preferred one first.

    A bare name that vLLM has a backend of its own for (facts of 0.16 to 0.33) means that one.
    """
    prefixed = PREFIX + backend
    return (prefixed,) if backend in registry.VLLMS_OWN else (backend, prefixed)


def name_in_vllm(backend: str) -> str:
    """The name to give ``WeightTransferConfig`` for the installed vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    loader = Factory._registry.get(backend)
    ours = loader is not None and _is_ours(loader)
    return backend if ours else PREFIX + backend


def _is_ours(loader: object) -> bool:
    cells = getattr(loader, "__closure__", None) or ()
    return any(cell.cell_contents == "vllm_wt.bridge.worker" for cell in cells)
