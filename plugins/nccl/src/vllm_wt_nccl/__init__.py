"""The ``nccl`` backend of vllm-wt: packed broadcasts from a trainer to all workers at once.

In the native form, for code that was written for vLLM's own backend::

    from vllm_wt_nccl import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_wt_nccl.native import NCCLWeightTransferEngine
    from vllm_wt_nccl.native_args import NCCLTrainerSendWeightsArgs
    from vllm_wt_nccl.native_info import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

__all__ = [
    "NCCLTrainerSendWeightsArgs",
    "NCCLWeightTransferEngine",
    "NCCLWeightTransferInitInfo",
    "NCCLWeightTransferUpdateInfo",
]

_MODULES = {
    "NCCLTrainerSendWeightsArgs": "native_args",
    "NCCLWeightTransferEngine": "native",
    "NCCLWeightTransferInitInfo": "native_info",
    "NCCLWeightTransferUpdateInfo": "native_info",
}


def __getattr__(name: str) -> Any:
    # When asked for: the plugin's module is in this package, and imports no torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
