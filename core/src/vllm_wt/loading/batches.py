"""An update in parts, each of which can be loaded into the live model by itself.

Where memory is short, a batch is received and loaded before the next one takes its place. What a
module makes of its tensors (fused rows, packed kernels, scales) it makes of all of them, so they are
in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from vllm_wt.errors import LoadError
from vllm_wt.loading.plan import LoadPlan


def batches(plan: LoadPlan, nbytes: int) -> tuple[tuple[str, ...], ...]:
    """Cut the tensors of a plan's manifest into consecutive batches, in the manifest's order.

    All tensors that a module takes elements from are in one batch, and so are those of modules that
    share memory. Between two tensors of one module nothing is cut, whatever is sent there.

    Args:
        plan: Of what is received: the full tensors, or slices of them.
        nbytes: As much as this goes into a batch; more, where it cannot be divided.
    """
    sizes = {tensor.name: tensor.nbytes for tensor in plan.manifest.tensors}
    found: list[list[str]] = []
    filled = 0
    for piece in _pieces(plan):
        size = sum(sizes[name] for name in piece)
        if found and filled + size <= nbytes:
            found[-1] += piece
            filled += size
        else:
            found.append(piece)
            filled = size
    return tuple(map(tuple, found))


def batch_of(plan: LoadPlan, parts: Sequence[Sequence[str]]) -> Mapping[str, int]:
    """The number of the batch that each of a plan's modules is loaded with.

    A module that takes no tensor, only constants, goes with one that it shares memory with, or with
    the first batch.

    Raises:
        LoadError: The batches are not the plan's tensors, in order, or divide a module.
    """
    names = [tensor.name for tensor in plan.manifest.tensors]
    if list(chain.from_iterable(parts)) != names:
        raise LoadError(
            "The batches are not the tensors of the plan",
            where="batches",
            expected=f"its {len(names)} tensors, each once and in its order",
            got=f"{sum(map(len, parts))} tensors in {len(parts)} batches",
            cure="cut them by vllm_wt.loading.batches, from the plan that is loaded by",
        )
    number = {name: n for n, part in enumerate(parts) for name in part}
    found: dict[str, int] = {}
    for modules in _together(plan):
        numbers = sorted({number[name] for name in _sources(plan, modules, number)})
        if len(numbers) > 1:
            raise LoadError(
                "What is loaded together is not in one batch",
                where=", ".join(filter(None, modules[:3])) or "the model as a whole",
                expected="all tensors that it takes elements from, in one batch",
                got=f"batches {numbers}",
                cure="cut them by vllm_wt.loading.batches, from the plan that is loaded by",
            )
        found |= dict.fromkeys(modules, numbers[0] if numbers else 0)
    return found


def _pieces(plan: LoadPlan) -> Iterator[list[str]]:
    """What cannot be divided, in order."""
    place = {tensor.name: n for n, tensor in enumerate(plan.manifest.tensors)}
    last = list(range(len(place)))  # of all that is loaded together with a tensor, the last
    for modules in _together(plan):
        places = [place[name] for name in _sources(plan, modules, place)]
        if places:
            first = min(places)
            last[first] = max(last[first], *places)
    piece: list[str] = []
    stop = 0
    for name, n in place.items():
        piece.append(name)
        stop = max(stop, last[n])
        if n == stop:
            yield piece
            piece, stop = [], n + 1


def _sources(plan: LoadPlan, modules: list[str], known: Mapping[str, int]) -> list[str]:
    if modules == [""] and "" in plan.fallbacks:
        return list(known)
    return [name for module in modules for name in plan.sources(module)]


def _together(plan: LoadPlan) -> list[list[str]]:
    """The modules of a plan, by groups that share memory; where it is loaded as a whole, just it."""
    if "" in plan.fallbacks:
        return [[""]]
    groups: dict[str, list[str]] = {}
    own = (parameter.module for parameter in plan.parameters.values())
    for module in chain(own, plan.fallbacks):
        groups.setdefault(module, [module])
    for parameter in plan.parameters.values():
        for alias in parameter.aliases:
            _join(groups, parameter.module, alias.rpartition(".")[0])
    return list({id(group): group for group in groups.values()}.values())


def _join(groups: dict[str, list[str]], one: str, other: str) -> None:
    into, taken = groups[one], groups.setdefault(other, [other])
    if into is taken:
        return
    if len(into) < len(taken):  # each module changes its group a few times only
        into, taken = taken, into
    into += taken
    groups |= dict.fromkeys(taken, into)
