"""Puts received weights into a live vLLM model, each module the fastest way that is right for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from vllm_wt.bridge import arming, compat, derived, experts, planning, tiers
from vllm_wt.bridge.arming import Modules, Write
from vllm_wt.bridge.asleep import require_awake
from vllm_wt.bridge.target import Part, Target, with_sharing
from vllm_wt.errors import WrongOrder
from vllm_wt.loading.apply import DirectWrites, Kept, Weights
from vllm_wt.loading.plan import LoadPlan, Parameter, full_name
from vllm_wt.manifest import Manifest
from vllm_wt.packing import warm_up

logger = logging.getLogger(__name__)


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
        self._target: Target | None = None
        self._next = 0  # which batch of the update that is under way
        self._known: dict[int, tuple[weakref.ref[Kept], Mapping[str, torch.Tensor]]] = {}
        """What came last, by batch, of what is kept; and the same by name."""

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        if self._rehearsed is None or self._rehearsed.manifest != manifest:
            found = planning.rehearse(self._model, self._vllm_config, self._device, manifest)
            plan, whole = found.plan, found.tiers.whole
            # vLLM's reload of the whole needs full tensors, whatever was recorded of them.
            self._rehearsed = plan if whole is None else LoadPlan.of_whole(manifest, whole)
            self._rehearsed = with_sharing(self._model, self._rehearsed)
        return self._rehearsed

    def use(self, plan: LoadPlan, batches: Sequence[Sequence[str]] | None = None) -> None:
        found = tiers.assign(self._model, plan, self._device)
        self._target = Target(self._model, plan, found, batches)
        self._next = 0
        self._known = {}
        warm_up(self._device)
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
        for part in self._current().parts:
            part.require_equal_twins(weights, where="seal")

    def require_awake(self) -> None:
        require_awake(next(iter(self._model.parameters())))

    def apply(self, weights: Weights) -> None:
        target = self._ready()
        values = self._by_name(0, weights)
        self._next = 0
        with self._loading(target):
            for part in target.parts:
                self._load(target, part, values, kept=isinstance(weights, Kept))
            self._refresh(target)
        compat.synchronize(self._device)

    def look(self) -> None:
        self._current()

    def apply_batch(self, number: int, weights: Weights, *, looked: bool = False) -> None:
        expected, self._next = self._next, 0
        if number not in {0, expected}:
            raise WrongOrder(
                f"Batch {number} is not the next one",
                where="apply_batch",
                expected=f"batch {expected}" if expected else "batch 0, which begins an update",
                got=f"batch {number}",
                cure="load a whole update anew, from its first batch",
            )
        target = self._ready() if number or looked else self._current()
        part = target.parts[number]
        if not self._knows(number, weights):
            part.require_names(weights)
        part.require_ready(number, weights)
        if number == 0:  # forward passes may have been queued on another thread's stream
            compat.synchronize(self._device)
        following = number + 1
        values = self._by_name(number, weights)
        with self._loading(target):
            self._load(target, part, values, kept=isinstance(weights, Kept))
            if following == len(target.parts):
                self._refresh(target)
        compat.synchronize(self._device)  # the memory of the batch is used again
        self._next = following % len(target.parts)

    def _by_name(self, number: int, weights: Weights) -> Mapping[str, torch.Tensor]:
        """The same object for the same tensors."""
        if not isinstance(weights, Kept):
            return dict(weights)
        if not self._knows(number, weights):
            gone = weakref.ref(weights, partial(self._forget, number))
            self._known[number] = gone, dict(weights)
        return self._known[number][1]

    def _knows(self, number: int, weights: Weights) -> bool:
        known = self._known.get(number)
        return known is not None and known[0]() is weights

    def _forget(self, number: int, gone: weakref.ref[Kept]) -> None:
        """An engine has let go of a batch."""
        known = self._known.get(number)
        if known is None or known[0] is not gone or self._target is None:
            return
        del self._known[number]
        if self._target.tiers.whole is not None:
            return
        parts = self._target.parts
        for part in parts if self._target.batches is None else parts[number : number + 1]:
            part.direct.forget()

    def _ready(self) -> Target:
        if self._target is None:
            raise WrongOrder("No plan to load by", cure="connect first")
        return self._target

    def _current(self) -> Target:
        """What to load; found anew where the model's tensors have been replaced behind our back.

        Raises:
            WrongOrder: They have no memory.
        """
        target = self._ready()
        self.require_awake()
        if not all(part.held.is_current() for part in target.parts):
            self.use(with_sharing(self._model, target.plan), target.batches)
        return self._ready()

    @contextmanager
    def _loading(self, target: Target) -> Iterator[None]:
        """What a load needs around it, on whatever thread."""
        with compat.device_context(self._device), ExitStack() as stack:
            if target.calls_vllm or self._device.type == "cpu":  # whose derived state is made anew
                stack.enter_context(compat.load_context(self._vllm_config, self._device))
            else:
                stack.enter_context(torch.inference_mode())
            yield

    def _load(
        self, target: Target, part: Part, values: Mapping[str, torch.Tensor], *, kept: bool
    ) -> None:
        if target.tiers.whole is not None:
            self._reload_whole(values)
            return
        part.direct.run(values, kept=kept)
        for module, parameters in part.layerwise.values():
            arming.reload(module, _writes(target.plan, parameters, values))
        if part.fallback:
            self._reload_some(target.plan, part.fallback, values)
        experts.refresh(part.experts)

    def _refresh(self, target: Target) -> None:
        """Make anew what modules keep of others, all of which are loaded by now."""
        for module in target.deferred:
            module.process_weights_after_loading(self._vllm_config.model_config.dtype)
        derived.refresh(self._model, self._device)

    def _reload_whole(self, values: Mapping[str, torch.Tensor]) -> None:
        try:
            arming.arm(self._model)
            self._model.load_weights(_own(values, values))
            arming.finalize(self._model, self._vllm_config.model_config)
            experts.refresh(self._model.modules())
        except BaseException:
            arming.disarm(self._model)
            raise

    def _reload_some(
        self, plan: LoadPlan, chosen: Sequence[str], values: Mapping[str, torch.Tensor]
    ) -> None:
        """Some modules, by their own loaders; what these give to other modules goes nowhere."""
        wanted = {name for module in chosen for name in plan.sources(module)}
        modules = dict(self._model.named_modules())
        names = frozenset(chosen)
        others = Modules(module for name, module in modules.items() if name not in names)
        try:
            arming.arm(self._model)
            arming.use_own_loaders(others)
            self._model.load_weights(_own(values, wanted))
            arming.disarm(others)
            some = Modules(modules[name] for name in chosen)
            arming.finalize(some, self._vllm_config.model_config)
        finally:
            arming.disarm(self._model)


def _own(
    values: Mapping[str, torch.Tensor], wanted: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies, for loaders that may write to what they are given: it can be the trainer's memory."""
    return ((name, tensor.clone()) for name, tensor in values.items() if name in wanted)


def _writes(
    plan: LoadPlan, parameters: list[Parameter], values: Mapping[str, torch.Tensor]
) -> dict[str, Write]:
    """What fills each of a module's parameters."""

    def fill(name: str, tensor: torch.Tensor) -> None:
        DirectWrites(plan, {name: tensor}).run(values)

    return {p.name: partial(fill, full_name(p.module, p.name)) for p in parameters}
