"""Kernels that vLLM does not update with the weights."""

from __future__ import annotations

import torch

from vllm_wt.errors import LoadError

_POINTS_AT_SCALES = "CPUInt8ScaledMMLinearKernel"
"""Its oneDNN handler points at scales that a reload (0.32) frees: the layer then computes nonsense."""


def require_updatable(model: torch.nn.Module) -> None:
    """Refuse a model with such kernels.

    Raises:
        LoadError: It has one.
    """
    for name, module in model.named_modules():
        kernel = type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__
        if kernel == _POINTS_AT_SCALES:
            raise LoadError(
                "The layer's kernel goes on with memory of the first load after an update",
                where=name,
                expected="a kernel that takes new weights",
                got=kernel,
                cure="quantise the checkpoint another way, or restart the engine for new weights",
            )
