"""What a load plan means for one live model: which of its tensors and modules, batch by batch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_wt.bridge import compat, experts, tiers
from vllm_wt.bridge.tiers import Tiers
from vllm_wt.errors import LoadError
from vllm_wt.loading.apply import DirectWrites, Weights, written_by
from vllm_wt.loading.batches import batch_of
from vllm_wt.loading.plan import Copy, LoadPlan, Parameter, full_name
from vllm_wt.loading.targets import Targets
from vllm_wt.packing import as_bytes
from vllm_wt.packing.places import are_at


class Held:
    """Tensors of a live model, and where they were found. Looked at in every commit, all at once."""

    def __init__(self) -> None:
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._places: list[int] = []

    def add(self, module: torch.nn.Module, name: str) -> Any:
        """A module's parameter or buffer; returns it."""
        parameters: dict[str, Any] = module._parameters
        owner = parameters if name in parameters else module._buffers
        tensor: Any = owner[name]
        self._owners.append(owner)
        self._names.append(name)
        self._tensors.append(tensor)
        self._places.append(tensor.data_ptr())
        return tensor

    def is_current(self) -> bool:
        """Whether the model still has these very tensors, where they were."""
        now = map(dict.get, self._owners, self._names)
        return are_at(self._tensors, self._places) and all(map(operator.is_, now, self._tensors))


@dataclass(eq=False)
class Part:
    """What is loaded together, a batch or everything, and the model's tensors as they are now.

    Args:
        names: The tensors that it is loaded from.
        in_place: Parameters that are written in place, by full name.
        held: The same, where they were found.
        layerwise: Modules that are made anew, each with its parameters.
        fallback: Modules that are loaded by their own loaders.
        loaded: All modules that get weights.
        experts: Those of them that `experts.refresh` has something to do for.
        twins: Pairs of copies that write the same elements, from different tensors.
    """

    names: tuple[str, ...]
    in_place: dict[str, torch.Tensor] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    layerwise: dict[str, tuple[torch.nn.Module, list[Parameter]]] = field(default_factory=dict)
    fallback: list[str] = field(default_factory=list)
    loaded: list[torch.nn.Module] = field(default_factory=list)
    experts: list[torch.nn.Module] = field(default_factory=list)
    twins: list[tuple[Copy, Copy]] = field(default_factory=list)
    direct: DirectWrites = field(init=False)
    """Everything that is written in place."""

    def require_names(self, weights: Weights) -> None:
        """Whether these are the tensors of the batch."""
        got = tuple(name for name, _ in weights)
        if got != self.names:
            raise LoadError(
                "These are not the tensors of the batch",
                where="apply_batch",
                expected=f"{len(self.names)} tensors, from {self.names[:1]} to {self.names[-1:]}",
                got=f"{len(got)} tensors, from {got[:1]} to {got[-1:]}",
                cure="this is a bug of vllm-wt: report it",
            )

    def require_ready(self, number: int, weights: Weights) -> None:
        """Whether a batch can be loaded; nothing of it has been."""
        # The first batch was looked at together with all others.
        if (
            number and not self.held.is_current()
        ):  # and what the batches before have loaded may be gone
            raise LoadError(
                "The model's tensors were replaced in the middle of an update",
                where="apply_batch",
                expected="the tensors that were there at its first batch",
                got="others",
                cure="let nothing else load, move or free the weights during an update; push again",
            )
        self.require_equal_twins(weights, where="apply_batch")

    def require_equal_twins(self, weights: Weights, where: str) -> None:
        values = dict(weights) if self.twins else {}
        for first, second in self.twins:
            one = written_by(first, values[first.source])
            other = written_by(second, values[second.source])
            if not torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous())):
                raise LoadError(
                    f"{first.source!r} and {second.source!r} differ, and the model has one "
                    "parameter for both",
                    where=where,
                    expected="equal values, or one of the two",
                    got="different values",
                    cure=f"leave {second.source!r} out where the model ties them",
                )


class Target:
    """A plan together with the model that it is for, in one part or in several.

    Attributes:
        parts: The batches in order; a single one without them.
        deferred: Modules that hold something made from others that are written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: LoadPlan,
        assigned: Tiers,
        batches: Sequence[Sequence[str]] | None,
    ) -> None:
        self.plan = plan
        self.tiers = assigned
        self.batches = batches
        if batches is None:
            self.parts = [Part(tuple(tensor.name for tensor in plan.manifest.tensors))]
        else:
            self.parts = [Part(tuple(names)) for names in batches]
        self.deferred: list[Any] = []
        if assigned.whole is not None:
            _require_one(self.parts, assigned.whole)
            return
        number = {} if batches is None else batch_of(plan, batches)
        modules = dict(model.named_modules())
        direct = frozenset(assigned.direct)

        def part_of(module: str) -> Part:
            return self.parts[number.get(module, 0)]

        for name, parameter in plan.parameters.items():
            module, part = modules[parameter.module], part_of(parameter.module)
            if parameter.module in assigned.layerwise:
                part.layerwise.setdefault(parameter.module, (module, []))[1].append(parameter)
            elif parameter.module in direct:
                part.in_place[name] = part.held.add(module, parameter.name)
        for name in assigned.fallback:
            part_of(name).fallback.append(name)
        for name in (*assigned.direct, *assigned.layerwise, *assigned.fallback):
            part_of(name).loaded.append(modules[name])
            if experts.prepares(modules[name]):
                part_of(name).experts.append(modules[name])
        for first, second in _twins(plan, _identities(model)):
            part_of(first.module).twins.append((first, second))
        for part in self.parts:
            part.direct = DirectWrites(plan, part.in_place)
        loaded = {id(module) for part in self.parts for module in part.loaded}
        self.deferred += [
            module
            for module in modules.values()
            if compat.is_deferred_attention(module)
            and any(id(each) in loaded for each in module.modules())
        ]

    @property
    def calls_vllm(self) -> bool:
        """Whether a load is more than writes into memory."""
        calls = any(part.layerwise or part.fallback or part.experts for part in self.parts)
        return calls or bool(self.deferred) or self.tiers.whole is not None


def _require_one(parts: Sequence[Part], reason: str) -> None:
    if len(parts) > 1:
        raise LoadError(
            "The model cannot be loaded in batches",
            where="load_weights",
            expected="one batch, for vLLM's reload of the whole model",
            got=f"{len(parts)} batches; {reason}",
            cure=f"leave {tiers.VARIABLE} unset, or give the engine memory for a whole update",
        )


def with_sharing(model: torch.nn.Module, plan: LoadPlan) -> LoadPlan:
    """The plan, and what shares memory in the live model: recorded were modules with their own."""
    shared: dict[str, list[str]] = {}
    for target in Targets(model):
        names = [full_name(*name) for each in target.sharing for name in each.names]
        if len(names) > 1:
            shared |= {full_name(*name): names for name in target.names}
    parameters = dict(plan.parameters)
    for name in shared.keys() & parameters.keys():
        known = parameters[name].aliases
        others = dict.fromkeys([*known, *(other for other in shared[name] if other != name)])
        if len(others) > len(known):
            parameters[name] = replace(parameters[name], aliases=tuple(others))
    return plan if parameters == plan.parameters else replace(plan, parameters=parameters)


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
