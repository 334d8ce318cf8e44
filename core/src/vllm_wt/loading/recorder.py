"""Runs a model's own loaders once, without any values, and makes a plan of what they do."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_wt.loading.plan import Cast, Copy, Fallback, Fill, LoadPlan, Parameter, full_name
from vllm_wt.loading.regions import coalesced, covered, dims, extent
from vllm_wt.loading.targets import Target, Targets
from vllm_wt.loading.tracing import Tracer, ValueNeededError, replaces_data
from vllm_wt.manifest import Manifest

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's ``load_weights``: takes the tensors of the checkpoint by name."""


def record(model: torch.nn.Module, load: Load, manifest: Manifest) -> LoadPlan:
    """Run a model's loaders over tensors without storage, and note what goes where.

    Nothing is written to the model, be its parameters real or on the meta device, and no value of
    it should be read. A loader that does read parameters finds what they hold now. Parameters that
    the loaders replace are put back.

    Args:
        model: Its parameters in the layout of the checkpoint, as loaders expect them.
        load: Usually ``model.load_weights``. It is called in the caller's context (inference mode,
            default device).
        manifest: The tensors, which ``load`` is given in this order.

    Returns:
        The plan. What the loaders do that is no copy of a region is in its fallbacks.

    Raises:
        Exception: Whatever ``load`` raises of itself, such as for a tensor of another shape.
    """
    targets = Targets(model)
    tracer = Tracer(targets)
    sources = tracer.sources(manifest)
    given: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sources:
            given.append(name)
            yield name, tensor

    ended = None
    wrapped = _wrap_loaders(tracer, targets)
    try:
        with torch.no_grad(), tracer:
            load(tensors())
    except ValueNeededError as error:
        ended = error
    except RuntimeError as error:
        if not replaces_data(error):
            raise
        ended = ValueNeededError("data of a parameter is replaced", given[-1:])
    finally:
        for tensor, loader, own in wrapped:
            if own:
                tensor.weight_loader = loader  # type: ignore[attr-defined]
            else:
                vars(tensor).pop("weight_loader", None)
        replaced = list(targets.restore())
    for module, parameter in replaced:
        tracer.fall_back_module(module, f"{full_name(module, parameter)} is replaced", given)
    for module in targets.uninitialized:
        tracer.fall_back_module(module, "a parameter without shape or strides", given)
    for reason, names in tracer.pending():
        tracer.fall_back_module("", reason, names)
    if ended is not None:
        _fall_back_rest(model, manifest, targets, tracer, ended)
    _fall_back_shared(targets, tracer)
    return _plan(manifest, targets, tracer, None if ended is None else ended.reason)


def _wrap_loaders(tracer: Tracer, targets: Targets) -> list[tuple[torch.Tensor, Any, bool]]:
    """Wrap each weight loader; returns what undoes it.

    That is the tensor, its loader, and whether it is to be set again: it may be the class's.
    """
    wrapped: dict[int, tuple[torch.Tensor, Any, bool]] = {}
    for tensor, target in targets.loaders:
        loader = getattr(tensor, "weight_loader", None)
        if callable(loader) and id(tensor) not in wrapped:
            of_class = getattr(type(tensor), "weight_loader", None)
            own = "weight_loader" in vars(tensor) or isinstance(of_class, property)
            wrapped[id(tensor)] = (tensor, loader, own)
            tensor.weight_loader = functools.wraps(loader)(  # type: ignore[attr-defined]
                tracer.loader(target, loader)
            )
    return list(wrapped.values())


def _fall_back_rest(
    model: torch.nn.Module,
    manifest: Manifest,
    targets: Targets,
    tracer: Tracer,
    ended: ValueNeededError,
) -> None:
    """The recording stopped: what is not complete may need any tensor that is not placed yet."""
    placed = {copy.source for _, copy in tracer.copies}
    unplaced = [tensor.name for tensor in manifest.tensors if tensor.name not in placed]
    names = [*unplaced, *ended.names]
    passing = {
        full_name(module_name, name)
        for module_name, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for target in targets:
        if target.name not in passing and sum(_coverage(target)) < math.prod(target.shape):
            tracer.fall_back(target, ended.reason, names)


def _fall_back_shared(targets: Targets, tracer: Tracer) -> None:
    """Modules that share memory are loaded the same way."""
    groups = [modules for target in targets if len(modules := target.modules) > 1]
    more = True
    while more:
        more = False
        for modules in groups:
            fallen = [module for module in modules if module in tracer.fallbacks]
            for module in modules if fallen else ():
                if module not in tracer.fallbacks:
                    names = tracer.fallbacks[fallen[0]][1]
                    reason = f"shares a parameter with {fallen[0] or 'the model'}"
                    tracer.fall_back_module(module, reason, names)
                    more = True


def _plan(manifest: Manifest, targets: Targets, tracer: Tracer, ended: str | None) -> LoadPlan:
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    order = {tensor.name: place for place, tensor in enumerate(manifest.tensors)}
    copies: list[Copy] = []
    used: set[str] = set()
    for target, copy in tracer.copies:
        fallen = [module for module in target.modules if module in tracer.fallbacks]
        for module in fallen:
            tracer.fallbacks[module][1].add(copy.source)
        if not fallen:
            if copy.casts:
                casts = simplified(dtypes[copy.source], copy.casts, copy.dest_dtype)
                copy = replace(copy, casts=casts)  # noqa: PLW2901
            copies.append(copy)
        used.add(copy.source)
    fallbacks = {
        module: Fallback(module, tuple(reasons), tuple(sorted(names, key=order.__getitem__)))
        for module, (reasons, names) in tracer.fallbacks.items()
    }
    for fallback in fallbacks.values():
        used.update(fallback.sources)
    fills: list[Fill] = []
    parameters: dict[str, Parameter] = {}
    for target in targets:
        if (target.copies or target.fills) and target.module not in fallbacks:
            fills += target.fills
            copied, filled = _coverage(target)
            parameters[target.name] = Parameter(
                target.module,
                target.names[0][1],
                tuple(
                    full_name(*name)
                    for each in target.sharing
                    for name in each.names
                    if name != target.names[0]
                ),
                str(target.dtype).removeprefix("torch."),
                target.shape,
                target.strides,
                copied,
                filled,
            )
    return LoadPlan(
        manifest=manifest,
        copies=tuple(_joined(copies)),
        fills=tuple(fills),
        parameters=parameters,
        fallbacks=fallbacks,
        unused=tuple(name for name in dtypes if name not in used),
        bypassing=frozenset(t.name for t in targets if t.meta and t.name in tracer.bypassing),
        ended=ended,
    )


def _coverage(target: Target) -> tuple[int, int]:
    """Distinct elements that come from copies, and those that only fills set."""
    if len(target.copies) == 1 and not target.fills:
        return target.copies[0].numel, 0
    copied = [(c.dest_offset, dims(c.shape, c.dest_strides)) for c in target.copies]
    filled = [(f.dest_offset, dims(f.shape, f.dest_strides)) for f in target.fills]
    from_copies = covered(copied) if copied else 0
    return from_copies, (covered([*copied, *filled]) - from_copies if filled else 0)


_EXACT: dict[str, frozenset[str]] = {
    "float8_e4m3fn": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float8_e5m2": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "bfloat16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}
"""Which dtypes hold every value of another."""


def simplified(source: str, casts: tuple[Cast, ...], dest: str) -> tuple[Cast, ...]:
    """Leave out casts that change nothing, given what comes before and after them.

    Only among floats, and bit for bit but for the payload of NaNs. Writing to the destination is
    a cast of its own, so one to the destination's dtype at the end goes too.
    """
    steps = list(casts)
    n = 0
    while n < len(steps):
        before = steps[n - 1].dtype if n else source
        last = n + 1 == len(steps)
        step, after = steps[n], Cast(dest) if last else steps[n + 1]
        if not step.bits and (
            step.dtype == before
            or (last and step.dtype == dest)
            or (
                not after.bits
                and step.dtype in _EXACT.get(before, ())
                and (after.dtype in _EXACT or after.dtype == before)
            )
        ):
            del steps[n]
            n = 0
        else:
            n += 1
    return tuple(steps)


def _joined(copies: list[Copy]) -> Iterator[Copy]:
    """Join neighbours that differ by constant distances only, such as a tensor's experts."""
    at = 0
    while at < len(copies):
        first, count = copies[at], 1
        read = write = 0
        while at + count < len(copies):
            last, following = copies[at + count - 1], copies[at + count]
            if not _alike(first, following):
                break
            distances = (
                following.source_offset - last.source_offset,
                following.dest_offset - last.dest_offset,
            )
            if count == 1:
                read, write = distances
                if read < 0 or write < extent(first.shape, first.dest_strides):
                    break
            elif distances != (read, write):
                break
            count += 1
        if count > 1:
            loops = zip(first.shape, first.source_strides, first.dest_strides, strict=True)
            joined = coalesced([(count, read, write), *loops])
            first = replace(
                first,
                shape=tuple(loop[0] for loop in joined),
                source_strides=tuple(loop[1] for loop in joined),
                dest_strides=tuple(loop[2] for loop in joined),
            )
        yield first
        at += count


def _alike(first: Copy, second: Copy) -> bool:
    return (
        first.source == second.source
        and first.parameter == second.parameter
        and first.module == second.module
        and first.shape == second.shape
        and first.source_strides == second.source_strides
        and first.dest_strides == second.dest_strides
        and first.casts == second.casts
    )
