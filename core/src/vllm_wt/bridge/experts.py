"""Mixture-of-experts kernels that prepare the weights when they are made.

vLLM prepares them once, through ``fused_experts.process_weights_after_loading``, and leaves that out
where weights are loaded again (0.32): its CPU kernels, which pack the experts, then read unpacked
ones, and generate nonsense without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_wt.errors import LoadError


def prepares(module: torch.nn.Module) -> bool:
    """Whether :func:`refresh` would do something for a module."""
    return _preparing(module) is not None


def refresh(modules: Iterable[torch.nn.Module]) -> None:
    """Prepare experts again, right after they were loaded, in the memory that they have.

    Args:
        modules: What was loaded: experts that were not would be prepared twice.
    """
    for module in modules:
        kernel = _preparing(module)
        if kernel is None:
            continue
        kept = dict(module._parameters)
        kernel.process_weights_after_loading(module)
        for name, parameter in kept.items():
            made = module._parameters[name]
            if parameter is not None and made is not None and made is not parameter:
                parameter.data.copy_(made.data)
                module._parameters[name] = parameter


def require_updatable(model: torch.nn.Module, device: torch.device) -> None:
    """Refuse kernels for which that is not known to be right.

    Raises:
        LoadError: The kernel is of another platform than CPU, or it has padded the experts.
    """
    for name, module in model.named_modules():
        kernel = _preparing(module)
        if kernel is None:
            continue
        padded = getattr(kernel, "_padded_intermediate_size", None)
        config = kernel.moe_config
        size = config.intermediate_size_per_partition
        if device.type != "cpu" or (padded is not None and padded(config) != size):
            raise LoadError(
                "The experts are laid out for a kernel that vLLM does not update",
                where=name,
                expected="experts as the kernel of vLLM's Triton backend takes them, or its CPU "
                "kernel without padding",
                got=type(kernel).__name__,
                cure="choose another MoE backend for the engine, or restart it for new weights",
            )


def _preparing(module: torch.nn.Module) -> Any | None:
    """The kernel that prepares a module's weights, if it has unquantised experts and such a kernel."""
    method = getattr(module, "quant_method", None)
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        return None
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    prepare = getattr(type(kernel), "process_weights_after_loading", None)
    return None if prepare is None or _is_no_op(type(kernel)) else kernel


def _is_no_op(kernel: type) -> bool:
    """Whether the kernel has vLLM's base method, which does nothing."""
    defined = next(c for c in kernel.__mro__ if "process_weights_after_loading" in vars(c))
    return defined.__module__.endswith(".modular_kernel")
