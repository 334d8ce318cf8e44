"""What a sync will do to a live vLLM model, found out before any byte is sent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_wt.bridge import arming, compat, experts, kernels, tiers
from vllm_wt.bridge.tiers import Tiers
from vllm_wt.errors import LoadError
from vllm_wt.loading.plan import LoadPlan, full_name
from vllm_wt.loading.recorder import record
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES

logger = logging.getLogger(__name__)

_WORDS = 160
"""Characters of vLLM's own words in an error."""


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Args:
        plan: Which elements of which tensor go where.
        tiers: How each module gets them.
    """

    plan: LoadPlan
    tiers: Tiers


def rehearse(
    model: torch.nn.Module, vllm_config: Any, device: torch.device, manifest: Manifest
) -> Rehearsal:
    """Run the model's loaders over tensors without values; the model is as before afterwards.

    Args:
        model: A model of vLLM's, in an engine or only built.
        vllm_config: Its configuration.
        device: Where the engine has it.
        manifest: The tensors that will be sent.

    Raises:
        LoadError: The model does not take these tensors, or would be left incomplete; or its experts
            move (EPLB), or it has a kernel that vLLM does not update.
    """
    _require_fixed_experts(vllm_config)
    experts.require_updatable(model, device)
    kernels.require_updatable(model)
    with compat.load_context(vllm_config, None):
        try:
            arming.arm(model)
            arming.use_own_loaders(model)
            plan = _recorded(model, manifest)
            missing = sorted(_missing(model, plan))
            _require_reloadable(plan)
            _require_real(plan)
        finally:
            arming.disarm(model)
    if missing:
        raise LoadError(
            "Parameters of the model would keep their old values",
            expected="every parameter covered",
            got=f"{len(missing)} not or partly covered: {', '.join(missing[:5])}",
            cure="send every tensor of the checkpoint",
        )
    return Rehearsal(plan, tiers.assign(model, plan, device))


def _require_fixed_experts(vllm_config: Any) -> None:
    if vllm_config.parallel_config.enable_eplb:
        raise LoadError(
            "The engine moves its experts between ranks (EPLB), and a plan says where each one is",
            where="parallel_config.enable_eplb",
            expected="experts that stay where they were loaded",
            got="enable_eplb=True",
            cure="start the engine without --enable-eplb",
        )


def _recorded(model: Any, manifest: Manifest) -> LoadPlan:
    """The plan; one of the whole model where its loaders cannot be followed."""
    sent: list[str] = []

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(_noting(weights, sent))

    plan = None
    try:
        plan = record(model, load, manifest)
        reason = plan.ended
    except Exception as error:
        reason = f"the loaders could not be followed: {type(error).__name__}: {error}"
        _require_taken(load, manifest, sent)
    if plan is not None and reason is None:
        return plan
    assert reason is not None
    logger.warning("vllm-wt: every tensor is needed in full: %s", reason)
    whole = LoadPlan.of_whole(manifest, reason)
    return whole if plan is None else replace(whole, bypassing=plan.bypassing)


def _require_reloadable(plan: LoadPlan) -> None:
    for fallback in plan.fallbacks.values():
        for name in (full_name(fallback.module, each) for each in compat.NEVER_ARMED):
            if f"{name} is replaced" in fallback.reasons:
                raise LoadError(
                    f"The model's loader puts another parameter in place of {name!r}",
                    where="load_weights",
                    expected="a loader that fills the parameters that there are",
                    got=f"{name} is replaced",
                    cure="restart the engine for new weights",
                )


def _require_real(plan: LoadPlan) -> None:
    """torch would leave the imaginary parts out, with a warning at most."""
    complex_ones = {t.name: t.dtype for t in plan.manifest.tensors if t.dtype.startswith("complex")}
    if not complex_ones:
        return
    for copy in plan.copies:
        parameter = plan.parameters[copy.destination]
        taken_apart = any(cast.bits for cast in copy.casts)
        if copy.source in complex_ones and not taken_apart and "complex" not in parameter.dtype:
            raise LoadError(
                f"{copy.source!r} is complex, and what it is loaded into is not",
                where="load_weights",
                expected=f"real values for {copy.destination}, {parameter.dtype}",
                got=complex_ones[copy.source],
                cure="send the tensor in the dtype of the model's checkpoint",
            )


def _noting(
    weights: Iterable[tuple[str, torch.Tensor]], sent: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        sent.append(name)
        yield name, tensor


def _require_taken(load: Any, manifest: Manifest, sent: list[str]) -> None:
    """Whether the loaders refuse the tensors, or just would not be followed."""
    try:
        sent.clear()
        load(
            (meta.name, torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device="meta"))
            for meta in manifest.tensors
        )
    except NotImplementedError:
        return  # a loader that looks at values, which tensors without them do not have
    except Exception as error:
        name = sent[-1] if sent else ""
        raise LoadError(
            f"The model does not take these weights: it refuses {name!r}",
            where="load_weights",
            expected="the names and full shapes of the model's checkpoint",
            got=_shortened(f"{type(error).__name__}: {error}"),
            cure=_cure(name),
        ) from error


def _missing(model: torch.nn.Module, plan: LoadPlan) -> Iterator[str]:
    """Parameters of an armed model that would not be filled, nor share memory with one that is."""
    if "" in plan.fallbacks:
        return
    short: dict[str, int] = {}
    filled: set[int] = set()
    for module_name, module in model.named_modules():
        if module_name in plan.fallbacks:
            continue
        sizes = arming.elements_to_load(module)
        for name, own in arming.own_tensors(module).items():
            if name in compat.NEVER_LOADED:
                continue
            written = plan.parameters.get(full_name(module_name, name))
            if written is not None and written.copied + written.filled >= sizes.get(name, 0):
                filled.add(id(own))
            elif sizes.get(name, 0):
                short[full_name(module_name, name)] = id(own)
    yield from (name for name, place in short.items() if place not in filled)


_WRAPPERS = {
    "_orig_mod.": "torch.compile has wrapped the module: give model._orig_mod",
    "module.": "data parallelism has wrapped the module: give model.module",
    "base_model.model.": "PEFT has wrapped the module: merge the adapter and give model.base_model",
}
"""What a wrapper puts before each name, and the way back."""


def _cure(name: str) -> str:
    for prefix, cure in _WRAPPERS.items():
        if name.startswith(prefix):
            return cure
    return "send the tensors under their checkpoint names and in full shape"


def _shortened(text: str) -> str:
    """vLLM lists all of its parameters, under names that no checkpoint has."""
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."
