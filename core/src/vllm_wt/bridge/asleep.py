"""Whether an engine's weights have memory: sleeping engines give theirs away, under the same addresses.

The driver is asked, and not vLLM: how it keeps account of that has changed between releases. A write to
memory that is gone would end the engine.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from vllm_wt.errors import WrongOrder

_MAPPED = 13
"""``CU_POINTER_ATTRIBUTE_MAPPED``."""


def require_awake(tensor: torch.Tensor) -> None:
    """Refuse weights that sleep.

    Args:
        tensor: One of them; all are awake or none.

    Raises:
        WrongOrder: They sleep.
    """
    if tensor.is_cuda and tensor.numel() and not _is_mapped(tensor.data_ptr()):
        raise WrongOrder(
            "The engine's weights are asleep",
            where="weights",
            expected="an engine that is awake, or has woken its weights",
            got="memory that was given away",
            cure='wake_up(tags=["weights"]) before the push; the KV cache may go on sleeping',
        )


def _is_mapped(address: int) -> bool:
    mapped = ctypes.c_int(0)
    code = _driver().cuPointerGetAttribute(
        ctypes.byref(mapped), ctypes.c_int(_MAPPED), ctypes.c_uint64(address)
    )
    return code == 0 and mapped.value != 0


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
