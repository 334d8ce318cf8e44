"""The recorded load plan: which elements of which checkpoint tensor go where in the model.

A plan is made once by :func:`vllm_wt.loading.recorder.record`, and says for each rank what to read
of each tensor and where it belongs, without running the model's loaders again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_wt.errors import LoadError, ManifestMismatch
from vllm_wt.loading.regions import runs, union
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt.packing import DTYPES, meta_of

GAP = 4096
"""Bytes: reading this much too much costs less than one more read, on the fabrics we use."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A step on an element's way.

    Args:
        dtype: What it becomes, by torch's name.
        bits: Whether its bits are taken for the new dtype, instead of its value converted.
    """

    dtype: str
    bits: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy. Offsets and strides are in elements, of the side that they belong to.

    Args:
        source: The checkpoint tensor, taken as contiguous.
        source_offset: Its first element that is read.
        source_strides: One for each dimension of ``shape``; 0 repeats an element.
        casts: What happens to each element before it is written; usually nothing.
        module: The module's name; empty for the model itself.
        parameter: The parameter or buffer of the module.
        dest_offset: Where it goes, counted from the parameter's own first element.
        dest_strides: One for each dimension of ``shape``.
        dest_dtype: The parameter's dtype, which the last value is converted to.
        shape: How many elements, with as few dimensions as it takes: not the tensors' own shape.
    """

    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    casts: tuple[Cast, ...]
    module: str
    parameter: str
    dest_offset: int
    dest_strides: tuple[int, ...]
    dest_dtype: str
    shape: tuple[int, ...]

    @property
    def destination(self) -> str:
        """The parameter's full name."""
        return full_name(self.module, self.parameter)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements that the loaders set to a constant, such as the padding of a vocabulary."""

    module: str
    parameter: str
    dest_offset: int
    dest_strides: tuple[int, ...]
    shape: tuple[int, ...]
    value: bool | int | float | complex

    @property
    def destination(self) -> str:
        """The parameter's full name."""
        return full_name(self.module, self.parameter)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that the plan writes.

    Args:
        module: The module that has it; of several, the first.
        name: Its name there.
        aliases: Full names of others that share memory with it: tied weights, views of it.
        dtype: torch's name.
        shape: Its shape.
        strides: Its strides, in elements: those of the plan's copies are only right with these.
        copied: Distinct elements that come from the checkpoint.
        filled: Distinct elements that are set to a constant. What is neither keeps its value.
    """

    module: str
    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copied: int
    filled: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A module that needs its full tensors and the model's own loader.

    Args:
        module: Its name; empty for the model itself, where no module could be made out.
        reasons: Why, each with the operation and the line of the model's code.
        sources: The checkpoint tensors that it may need.
    """

    module: str
    reasons: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """What to read of one checkpoint tensor.

    Args:
        runs: Offset and length of each read, in bytes, sorted and apart.
        nbytes: Bytes among them that are used.
    """

    runs: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def waste(self) -> int:
        """Bytes that are read for the sake of fewer runs only."""
        return sum(length for _, length in self.runs) - self.nbytes


@dataclass(frozen=True)
class LoadPlan:
    """What a load does, for this rank.

    Args:
        manifest: The checkpoint that was recorded.
        copies: In the loaders' order. Of two that write one element, the later one counts.
        fills: They come before all copies.
        parameters: What copies and fills write, by full name.
        fallbacks: By module; none of their parameters is in the three above.
        unused: Tensors that nothing on this rank takes: they need not be sent here.
        ended: Why the recording stopped before all tensors were loaded. What was not loaded
            completely by then is among the fallbacks.
    """

    manifest: Manifest
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    parameters: Mapping[str, Parameter]
    fallbacks: Mapping[str, Fallback]
    unused: tuple[str, ...]
    ended: str | None = None

    @cached_property
    def direct(self) -> tuple[str, ...]:
        """Modules that can be written without their loaders, as far as these go: whether the
        running kernel has its weights in this layout is not known here."""
        return tuple(dict.fromkeys(parameter.module for parameter in self.parameters.values()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the checkpoint that this rank needs, each counted once."""
        return sum(self.needed(tensor.name, gap=0).nbytes for tensor in self.manifest.tensors)

    def needed(self, name: str, gap: int = GAP) -> Needed:
        """What to read of a checkpoint tensor.

        Args:
            name: Its name.
            gap: Bytes. Two runs with no more between them are read as one.

        Returns:
            No runs if it is unused, one over all of it if a module falls back to it.

        Raises:
            ManifestMismatch: There is no tensor of this name.
        """
        tensor = self._tensor(name)
        if name in self._whole:
            return Needed(((0, tensor.nbytes),) if tensor.nbytes else (), tensor.nbytes)
        copies = self._by_source.get(name)
        if not copies:
            return Needed((), 0)
        itemsize = ITEMSIZE[tensor.dtype]
        regions = [
            runs(copy.source_offset, zip(copy.shape, copy.source_strides, strict=True))
            for copy in copies
        ]
        exact = union(regions)
        used = sum(end - start for start, end in exact)
        joined: list[list[int]] = []
        for start, end in exact:
            if joined and (start - joined[-1][1]) * itemsize <= gap:
                joined[-1][1] = end
            else:
                joined.append([start, end])
        spans = tuple((start * itemsize, (end - start) * itemsize) for start, end in joined)
        return Needed(spans, used * itemsize)

    def sources(self, module: str) -> tuple[str, ...]:
        """The checkpoint tensors that a module takes elements from, in order of first use."""
        if module in self.fallbacks:
            return self.fallbacks[module].sources
        return self._by_module.get(module, ())

    def _tensor(self, name: str) -> TensorMeta:
        if name not in self._tensors:
            raise ManifestMismatch(
                f"The plan knows no tensor {name!r}",
                expected=f"one of the {len(self.manifest)} that were recorded",
                cure="connect again after changing what is sent",
            )
        return self._tensors[name]

    @cached_property
    def _tensors(self) -> dict[str, TensorMeta]:
        return {tensor.name: tensor for tensor in self.manifest.tensors}

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(name for each in self.fallbacks.values() for name in each.sources)

    @cached_property
    def _by_source(self) -> dict[str, list[Copy]]:
        found: dict[str, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.source, []).append(copy)
        return found

    @cached_property
    def _by_module(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {}
        for copy in self.copies:
            found.setdefault(copy.module, {})[copy.source] = None
        return {module: tuple(names) for module, names in found.items()}


def replay(
    plan: LoadPlan, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Do what a plan says, one copy at a time: the reference for faster ways.

    Args:
        plan: Its fallbacks are not done here.
        sources: The full tensors of the checkpoint, at least those that ``plan.copies`` read.
        parameters: The parameters that it writes, by full name, with the strides of the recording.

    Raises:
        LoadError: A parameter is missing or differs from the recorded one; nothing is written.
        ManifestMismatch: A source is missing or differs from the manifest; nothing is written.
    """
    for name, expected in plan.parameters.items():
        _require_parameter(name, expected, parameters.get(name))
    flat = {}
    for name in dict.fromkeys(copy.source for copy in plan.copies):
        tensor = sources.get(name)
        if tensor is None or meta_of(name, tensor) != plan._tensor(name):
            raise ManifestMismatch(
                f"The source {name!r} is not as it was recorded",
                where="replay",
                expected=plan._tensor(name),
                got="nothing" if tensor is None else meta_of(name, tensor),
                cure="connect again after changing what is sent",
            )
        flat[name] = tensor.detach().contiguous()
    with torch.no_grad():
        for fill in plan.fills:
            dest = parameters[fill.destination].detach()
            _region(dest, fill.shape, fill.dest_strides, fill.dest_offset).fill_(fill.value)
        for copy in plan.copies:
            value = _region(flat[copy.source], copy.shape, copy.source_strides, copy.source_offset)
            for cast in copy.casts:
                dtype = DTYPES[cast.dtype]
                value = value.contiguous().view(dtype) if cast.bits else value.to(dtype)
            dest = parameters[copy.destination].detach()
            _region(dest, copy.shape, copy.dest_strides, copy.dest_offset).copy_(value)


def _require_parameter(name: str, expected: Parameter, tensor: torch.Tensor | None) -> None:
    got = tensor if tensor is None else (meta_of(name, tensor), tensor.stride())
    if got != (TensorMeta(name, expected.dtype, expected.shape), expected.strides):
        raise LoadError(
            f"The parameter {name!r} is not as it was recorded",
            where="replay",
            expected=f"{expected.dtype} {list(expected.shape)}, strides {list(expected.strides)}",
            got="nothing" if got is None else got,
            cure="record again after the model has changed",
        )


def _region(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def full_name(module: str, parameter: str) -> str:
    """The name of a module's parameter, as the model's ``named_parameters()`` has it."""
    return f"{module}.{parameter}" if module else parameter
