"""Where many tensors are, looked at in little time: both sides do so several times a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_compared: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
"""As the map below, without an object for each address; torch has it where it has CUDA."""


def places_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Their addresses."""
    # Parameters of vLLM's are of a class that would take part in each question.
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(torch.Tensor.data_ptr, tensors))


def are_at(tensors: list[torch.Tensor], places: list[int]) -> bool:
    """Whether they are at these addresses."""
    if _compared is None:
        return places_of(tensors) == places
    with torch._C.DisableTorchFunctionSubclass():
        return bool(_compared(tensors, places, list(range(len(tensors)))))
