"""Puts received weights into a live vLLM model, each module the fastest way that is right for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from vllm_wt.bridge import arming, compat, derived, experts, planning, tiers
from vllm_wt.bridge.arming import Modules, Write
from vllm_wt.bridge.tiers import Tiers
from vllm_wt.errors import LoadError, WrongOrder
from vllm_wt.loading.apply import DirectWrites, written_by
from vllm_wt.loading.plan import Copy, LoadPlan, Parameter, full_name
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes

logger = logging.getLogger(__name__)

Weights = list[tuple[str, torch.Tensor]]


class ModelWeights:
    """Implements `vllm_wt.loading.apply.ModelLoader` for a live vLLM model.

    Args:
        model: The worker's model.
        vllm_config: Its configuration.
        device: Where it lives.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model: Any = model  # vLLM's models have load_weights, which nn.Module has not
        self._vllm_config = vllm_config
        self._device = device
        self._rehearsed: LoadPlan | None = None
        self._target: _Target | None = None

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        if self._rehearsed is None or self._rehearsed.manifest != manifest:
            found = planning.rehearse(self._model, self._vllm_config, self._device, manifest)
            _Target(self._model, found.plan, found.tiers)  # what it refuses is refused here
            self._rehearsed = found.plan
        return self._rehearsed

    def use(self, plan: LoadPlan) -> None:
        found = tiers.assign(self._model, plan, self._device)
        self._target = _Target(self._model, plan, found)
        if found.whole is not None:
            logger.info("vllm-wt: vLLM's reload of the whole model: %s", found.whole)
            return
        logger.info(
            "vllm-wt: %d modules are written directly, %d made anew layerwise, %d by their loaders",
            *map(len, (found.direct, found.layerwise, found.fallback)),
        )

    def report(self) -> dict[str, Any]:
        """How each module gets its weights, by the fields of `Tiers`."""
        found = self._ready().tiers
        return {
            "direct": list(found.direct),
            "layerwise": dict(found.layerwise),
            "fallback": {module: list(reasons) for module, reasons in found.fallback.items()},
            "whole": found.whole,
        }

    def check(self, weights: Weights) -> None:
        target = self._ready()
        if not target.is_current():
            self.use(target.plan)
        values = dict(weights)
        for first, second in target.twins:
            one = written_by(first, values[first.source])
            other = written_by(second, values[second.source])
            if not torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous())):
                raise LoadError(
                    f"{first.source!r} and {second.source!r} differ, and the model has one "
                    "parameter for both",
                    where="seal",
                    expected="equal values, or one of the two",
                    got="different values",
                    cure=f"leave {second.source!r} out where the model ties them",
                )

    def apply(self, weights: Weights) -> None:
        target = self._ready()
        with compat.load_context(self._vllm_config, self._device):
            if target.tiers.whole is not None:
                self._reload_whole(weights)
            else:
                values = dict(weights)
                target.direct.run(values)
                for module, parameters in target.layerwise:
                    arming.reload(module, _writes(target.plan, parameters, values))
                if target.tiers.fallback:
                    self._reload_some(target, weights)
                experts.refresh(target.loaded)
                for module in target.deferred:
                    module.process_weights_after_loading(self._vllm_config.model_config.dtype)
            derived.refresh(self._model, self._device)
        compat.synchronize(self._device)

    def _ready(self) -> _Target:
        if self._target is None:
            raise WrongOrder("No plan to load by", cure="connect first")
        return self._target

    def _reload_whole(self, weights: Weights) -> None:
        try:
            arming.arm(self._model)
            self._model.load_weights(weights)
            arming.finalize(self._model, self._vllm_config.model_config)
            experts.refresh(self._model.modules())
        except BaseException:
            arming.disarm(self._model)
            raise

    def _reload_some(self, target: _Target, weights: Weights) -> None:
        """The fallbacks, by their own loaders; what these give to other modules goes nowhere."""
        chosen = target.tiers.fallback
        wanted = {name for module in chosen for name in target.plan.sources(module)}
        modules = dict(self._model.named_modules())
        others = Modules(module for name, module in modules.items() if name not in chosen)
        try:
            arming.arm(self._model)
            arming.use_own_loaders(others)
            self._model.load_weights((n, tensor) for n, tensor in weights if n in wanted)
            arming.disarm(others)
            some = Modules(modules[name] for name in chosen)
            arming.finalize(some, self._vllm_config.model_config)
        finally:
            arming.disarm(self._model)


class _Target:
    """A plan together with the model's tensors that it writes, as they are now.

    Attributes:
        direct: Everything that is written in place.
        layerwise: Modules that are made anew, each with its parameters.
        loaded: All modules that get weights.
        deferred: Modules that hold something made from others that are written.
        twins: Pairs of copies that write the same elements, from different tensors.
    """

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, assigned: Tiers) -> None:
        self.plan = plan
        self.tiers = assigned
        modules = dict(model.named_modules())
        self._held: list[tuple[torch.nn.Module, str, torch.Tensor, int]] = []
        in_place: dict[str, torch.Tensor] = {}
        assigned_directly = frozenset(assigned.direct)
        anew: dict[str, list[Parameter]] = {name: [] for name in assigned.layerwise}
        for name, parameter in plan.parameters.items():
            if parameter.module in anew:
                anew[parameter.module].append(parameter)
            elif parameter.module in assigned_directly:
                module = modules[parameter.module]
                tensor = getattr(module, parameter.name)
                in_place[name] = tensor
                self._held.append((module, parameter.name, tensor, tensor.data_ptr()))
        self.direct = DirectWrites(plan, in_place)
        self.layerwise = [(modules[name], parameters) for name, parameters in anew.items()]
        self.loaded = [
            modules[name] for name in (*assigned.direct, *assigned.layerwise, *assigned.fallback)
        ]
        loaded = {id(module) for module in self.loaded}
        self.deferred: list[Any] = [
            module
            for module in modules.values()
            if compat.is_deferred_attention(module)
            and any(id(part) in loaded for part in module.modules())
        ]
        self.twins = list(_twins(plan, _identities(model)))

    def is_current(self) -> bool:
        """Whether the model still has the tensors that were found, where they were."""
        return all(
            getattr(module, name, None) is tensor and tensor.data_ptr() == place
            for module, name, tensor, place in self._held
        )


def _writes(
    plan: LoadPlan, parameters: list[Parameter], values: Mapping[str, torch.Tensor]
) -> dict[str, Write]:
    """What fills each of a module's parameters."""

    def fill(name: str, tensor: torch.Tensor) -> None:
        DirectWrites(plan, {name: tensor}).run(values)

    return {p.name: partial(fill, full_name(p.module, p.name)) for p in parameters}


def _twins(plan: LoadPlan, places: Mapping[str, object]) -> Iterator[tuple[Copy, Copy]]:
    """Copies from different tensors to the same elements, where parameters are shared."""
    first: dict[tuple[object, ...], Copy] = {}
    for copy in plan.copies:
        # A kernel may have done away with a parameter, which then shares its memory with no other.
        parameter = places.get(copy.destination, copy.destination)
        place = (parameter, copy.dest_offset, copy.dest_strides, copy.shape)
        other = first.setdefault(place, copy)
        if other.source != copy.source:
            yield other, copy


def _identities(model: torch.nn.Module) -> Mapping[str, object]:
    """Which parameters and buffers are the same tensor, by full name."""
    return {
        full_name(module_name, name): id(tensor)
        for module_name, module in model.named_modules()
        for places in (module._parameters, module._buffers)
        for name, tensor in places.items()
        if tensor is not None
    }
