"""Which modules of a live model may be written directly, and why the others may not.

That a tensor has the checkpoint's shape proves nothing: kernels permute in place, swap halves, or
keep packed copies. So a module is written directly only if it is known that nobody does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_wt.bridge import compat
from vllm_wt.errors import InvalidInfo, LoadError
from vllm_wt.loading.apply import recorded_as
from vllm_wt.loading.plan import LoadPlan

VARIABLE = "VLLM_WT_APPLY"
_MODES = ("direct", "layerwise", "reload")


@dataclass(frozen=True)
class Tiers:
    """How each module gets its weights.

    Args:
        direct: Modules that are written in place.
        layerwise: Modules that vLLM's layerwise reload makes anew from the same slices, and why.
        fallback: Modules that need full tensors and the model's own loader, and why.
        whole: Why everything goes through vLLM's reload of the whole model; None if it does not.
    """

    direct: tuple[str, ...]
    layerwise: Mapping[str, str]
    fallback: Mapping[str, tuple[str, ...]]
    whole: str | None = None


def mode() -> str:
    """What `VLLM_WT_APPLY` allows: ``direct`` (default), ``layerwise`` or ``reload``.

    Raises:
        InvalidInfo: It has another value.
    """
    value = os.environ.get(VARIABLE, _MODES[0])
    if value not in _MODES:
        raise InvalidInfo(
            f"{VARIABLE} has a value that means nothing",
            where="environment of the vLLM worker",
            expected=" or ".join(_MODES),
            got=value,
            cure=f"set it to one of these, or unset it: {_MODES[0]} is the default",
        )
    return value


def assign(model: torch.nn.Module, plan: LoadPlan, device: torch.device) -> Tiers:
    """Give every module of a plan its tier; the model is as its kernels use it, not armed.

    Raises:
        InvalidInfo: `VLLM_WT_APPLY` makes no sense.
        LoadError: A module's tier would leave a parameter with its old values.
    """
    found = _assigned(model, plan, device)
    for name in sorted(plan.bypassing):
        # vLLM's reload counts what passes its loaders, and puts old values back over the rest.
        reason = found.whole or "; ".join(found.fallback.get(name.rpartition(".")[0], ()))
        if reason:
            raise LoadError(
                f"{name!r} would keep its old values: the model writes it past its weight loader, and "
                "vLLM's reload does not see that",
                where="load_weights",
                expected="a module that the load plan can write",
                got=reason,
                cure=f"leave {VARIABLE} unset, or restart the engine for new weights",
            )
    return found


def _assigned(model: torch.nn.Module, plan: LoadPlan, device: torch.device) -> Tiers:
    allowed = mode()
    whole = plan.fallbacks[""].reasons[0] if "" in plan.fallbacks else None
    if allowed == "reload":
        whole = f"{VARIABLE}={allowed}"
    if whole is not None:
        return Tiers((), {}, {}, whole)
    modules = dict(model.named_modules())
    fallback = {module: each.reasons for module, each in plan.fallbacks.items()}
    direct, layerwise = [], {}
    by_module: dict[str, list[str]] = {}
    for name, parameter in plan.parameters.items():
        by_module.setdefault(parameter.module, []).append(name)
    for name, parameters in by_module.items():
        module = modules[name]
        if compat.is_deferred_attention(module):
            fallback[name] = ("attention scales, which vLLM creates anew for each load",)
            continue
        reason = f"{VARIABLE}={allowed}" if allowed == "layerwise" else _obstacle(module, device)
        reason = reason or _other_layout(module, plan, parameters)
        if reason is None:
            direct.append(name)
        else:
            layerwise[name] = reason
    return Tiers(tuple(direct), layerwise, fallback)


def _other_layout(module: torch.nn.Module, plan: LoadPlan, parameters: list[str]) -> str | None:
    for name in parameters:
        recorded = plan.parameters[name]
        tensor = getattr(module, recorded.name, None)
        if not isinstance(tensor, torch.Tensor) or not recorded_as(recorded, tensor):
            return f"the kernel has its {recorded.name} in another layout"
    return None


def _obstacle(module: torch.nn.Module, device: torch.device) -> str | None:
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        # vLLM processes loaded weights through these two methods, and touches no other module.
        own = callable(getattr(module, "process_weights_after_loading", None))
        return f"{type(module).__name__} processes its weights itself" if own else None
    kind = type(method).__name__
    platform = "rocm" if torch.version.hip else device.type
    rule = _RULES.get((platform, kind))
    if rule is None:
        return f"{kind} on {platform} is not known to leave weights as they are loaded"
    return rule(module, method)


def _always(module: torch.nn.Module, method: Any) -> str | None:
    return None


def _unless_cpu_packs(module: torch.nn.Module, method: Any) -> str | None:
    """A function that closes over nothing has no packed copy of the weight."""
    multiply = getattr(module, "cpu_linear", None)
    if multiply is torch.nn.functional.linear or (
        callable(multiply) and not getattr(multiply, "__closure__", None)
    ):
        return None
    return "the CPU's kernel keeps a packed copy of the weight"


def _if_triton(module: torch.nn.Module, method: Any) -> str | None:
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend == "TRITON":
        return None
    return f"the experts' kernel ({backend}) has a layout of its own"


_RULES: dict[tuple[str, str], Callable[[torch.nn.Module, Any], str | None]] = {
    ("cuda", "UnquantizedLinearMethod"): _always,
    ("cuda", "_GateLinearMethod"): _always,
    ("cuda", "UnquantizedEmbeddingMethod"): _always,
    ("cuda", "UnquantizedFusedMoEMethod"): _if_triton,
    ("cpu", "UnquantizedLinearMethod"): _unless_cpu_packs,
    ("cpu", "_GateLinearMethod"): _unless_cpu_packs,
    ("cpu", "UnquantizedEmbeddingMethod"): _unless_cpu_packs,
}
"""By platform and vLLM's method for the layer (read in 0.26 to 0.33): what would stand in the way."""
