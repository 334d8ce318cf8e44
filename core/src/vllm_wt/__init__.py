"""Weight-transfer backends for vLLM: a small core plus separately installable plugins.

Importing this package imports neither torch nor vllm; the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Kind

if TYPE_CHECKING:
    from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine
    from vllm_wt.group import StoreGroup
    from vllm_wt.results import EngineStatus, PushResult
    from vllm_wt.session import WeightSync
    from vllm_wt.source import (
        Announced,
        ModuleSource,
        SafetensorsSource,
        StateDictSource,
        WeightSource,
        take_part,
    )

__version__ = "0.1.0"

__all__ = [
    "Announced",
    "BackendSpec",
    "EngineStatus",
    "Kind",
    "ModuleSource",
    "PushResult",
    "SafetensorsSource",
    "StateDictSource",
    "StoreGroup",
    "TrainerWeightTransferEngine",
    "WeightSource",
    "WeightSync",
    "WeightTransferEngine",
    "__version__",
    "hookimpl",
    "take_part",
]

_LAZY = {
    "Announced": "vllm_wt.source",
    "EngineStatus": "vllm_wt.results",
    "ModuleSource": "vllm_wt.source",
    "PushResult": "vllm_wt.results",
    "SafetensorsSource": "vllm_wt.source",
    "StateDictSource": "vllm_wt.source",
    "StoreGroup": "vllm_wt.group",
    "TrainerWeightTransferEngine": "vllm_wt.engine",
    "WeightSource": "vllm_wt.source",
    "WeightSync": "vllm_wt.session",
    "WeightTransferEngine": "vllm_wt.engine",
    "take_part": "vllm_wt.source",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
