"""The one place that imports UCXX, which has no types: everything of it is ``Any``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_wt.errors import BackendUnavailable
from vllm_wt_rdma.nixl import BACKEND, MEMORY_EVENTS

_DISTRIBUTIONS = ("ucxx-cu13", "ucxx-cu12")
CURE = "pip install 'vllm-wt-rdma[ucx]', or for CUDA 12: pip install 'vllm-wt-rdma[ucx-cu12]'"
_OPTIONS = {"TLS": "^sm", "RNDV_THRESH": "8192"}
"""Nothing of UCX's `sm`. Over memory that peers share (posix, sysv) UCX 1.21 does not tell that one has
died, and its progress over what a dead one has left has ended a reader's process. It leaves those out
by itself where failures are to be reported, unless `UCX_POSIX_ERROR_HANDLING` says otherwise: this is
for certain. Copies between processes (cma), which do report it, go with them.
Longer messages than the last one's bytes are fetched when they are received; of one that is pushed in
pieces UCX could not be told that its peer was closed."""
_FORCED = {"RCACHE_ENABLE": "y"}
"""Whatever the environment says. Without its cache of registrations, which it makes do without where
it doesn't see memory come and go (`UCX_MEM_EVENTS=n`), UCX 1.21 crashes when a peer dies in the middle
of a long message (openucx/ucx#11467); by this it refuses to start instead."""
_MEMORY = (MEMORY_EVENTS, "UCX_MEM_MMAP_HOOK_MODE")
"""By what UCX is told not to see it."""


@dataclass(frozen=True)
class Ucxx:
    """An imported UCXX.

    Args:
        api: Its module of blocking calls.
        array: Wraps memory for those calls.
        version: Distribution and version, for people.
    """

    api: Any
    array: Any
    version: str

    def context(self) -> Any:
        """A context for tag messages; what the environment sets is left to it.

        Raises:
            BackendUnavailable: UCX can't watch this process's memory.
        """
        chosen = {key: value for key, value in _OPTIONS.items() if f"UCX_{key}" not in os.environ}
        try:
            return self.api.UCXContext(
                config_dict=chosen | _FORCED, feature_flags=(self.api.Feature.TAG,)
            )
        except self.api.UCXUnsupportedError:
            raise BackendUnavailable(
                "UCX can't see this process's memory come and go, without which it would crash "
                "with a peer that dies",
                backend=BACKEND,
                where="start",
                expected=f"none of {', '.join(_MEMORY)} set when UCX was loaded",
                got=", ".join(f"{k}={os.environ[k]}" for k in _MEMORY if k in os.environ)
                or "none now",
                cure='unset them and start again; or transport="nixl"',
            ) from None


@lru_cache(maxsize=1)
def load() -> Ucxx:
    """Import UCXX. Its import changes settings of UCX in the environment, where they would reach
    NIXL's UCX and the processes that are started from here: they are taken out again.

    Raises:
        BackendUnavailable: It is not installed, or can't be imported.
    """
    before = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
    try:
        api = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except Exception as error:  # a wheel that doesn't fit fails in many ways: OSError, ...
        raise BackendUnavailable(
            "UCXX cannot be imported",
            backend=BACKEND,
            where="import",
            expected=" or ".join(_DISTRIBUTIONS),
            got=f"{type(error).__name__}: {error}",
            cure=CURE,
        ) from None
    finally:
        for key in [key for key in os.environ if key.startswith("UCX_") and key not in before]:
            del os.environ[key]
    return Ucxx(api, array, _version())


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "ucxx, built from source"
