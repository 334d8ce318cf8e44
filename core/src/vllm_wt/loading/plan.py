"""The recorded load plan: which elements of which checkpoint tensor go where in the model.

A plan is made once by :func:`vllm_wt.loading.recorder.record`, and says for each rank what to read
of each tensor and where it belongs, without running the model's loaders again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from vllm_wt.errors import ManifestMismatch
from vllm_wt.loading.regions import runs, union
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta

GAP = 1 << 14
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
        bypassing: Full names of parameters, fallbacks' too, that are on meta and written by something
            else than their weight loader: whoever counts on the loaders to fill them does not see it.
        ended: Why the recording stopped before all tensors were loaded. What was not loaded
            completely by then is among the fallbacks.
    """

    manifest: Manifest
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    parameters: Mapping[str, Parameter]
    fallbacks: Mapping[str, Fallback]
    unused: tuple[str, ...]
    bypassing: frozenset[str] = frozenset()
    ended: str | None = None

    @classmethod
    def of_whole(cls, manifest: Manifest, reason: str) -> LoadPlan:
        """The plan of a model that takes every tensor in full, by its own loaders."""
        names = tuple(tensor.name for tensor in manifest.tensors)
        return cls(manifest, (), (), {}, {"": Fallback("", (reason,), names)}, ())

    @cached_property
    def direct(self) -> tuple[str, ...]:
        """Modules that can be written without their loaders, as far as these go: whether the
        running kernel has its weights in this layout is not known here."""
        return tuple(dict.fromkeys(parameter.module for parameter in self.parameters.values()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the checkpoint that this rank needs, each counted once."""
        return sum(self.needed(tensor.name, gap=0).nbytes for tensor in self.manifest.tensors)

    def needed(self, name: str, gap: int = GAP, alignment: int = 1) -> Needed:
        """What to read of a checkpoint tensor.

        Args:
            name: Its name.
            gap: Bytes. Two runs with no more between them are read as one.
            alignment: Bytes. Runs start and end at multiples of this, or at the tensor's end.

        Returns:
            No runs if it is unused, one over all of it if a module falls back to it.

        Raises:
            ManifestMismatch: There is no tensor of this name.
        """
        tensor = self.source(name)
        if name in self._whole:
            return Needed(((0, tensor.nbytes),) if tensor.nbytes else (), tensor.nbytes)
        copies = self._by_source.get(name)
        if not copies:
            return Needed((), 0)
        reads = tuple((copy.source_offset, copy.shape, copy.source_strides) for copy in copies)
        key = (reads, tensor.numel, ITEMSIZE[tensor.dtype], gap, alignment)
        if key not in self._alike:
            self._alike[key] = _needed(*key)
        return self._alike[key]

    def sources(self, module: str) -> tuple[str, ...]:
        """The checkpoint tensors that a module takes elements from, in order of first use."""
        if module in self.fallbacks:
            return self.fallbacks[module].sources
        return self._by_module.get(module, ())

    def into(self, parameter: str) -> tuple[list[Fill], list[Copy]]:
        """What writes a parameter, by its full name, in the order in which it is done."""
        return self._fills_into.get(parameter, []), self._copies_into.get(parameter, [])

    def source(self, name: str) -> TensorMeta:
        """A tensor of the manifest.

        Raises:
            ManifestMismatch: There is none of this name.
        """
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
    def _alike(self) -> dict[object, Needed]:
        """What was found before: a model's layers, and their experts, are alike."""
        return {}

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
    def _fills_into(self) -> dict[str, list[Fill]]:
        found: dict[str, list[Fill]] = {}
        for fill in self.fills:
            found.setdefault(fill.destination, []).append(fill)
        return found

    @cached_property
    def _copies_into(self) -> dict[str, list[Copy]]:
        found: dict[str, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.destination, []).append(copy)
        return found

    @cached_property
    def _by_module(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {}
        for copy in self.copies:
            found.setdefault(copy.module, {})[copy.source] = None
        return {module: tuple(names) for module, names in found.items()}


def _needed(
    reads: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
    numel: int,
    itemsize: int,
    gap: int,
    alignment: int,
) -> Needed:
    """The runs of some strided reads (offset, shape, strides) of a tensor."""
    exact = union(
        [runs(offset, zip(shape, strides, strict=True)) for offset, shape, strides in reads]
    )
    used = sum(end - start for start, end in exact)
    step = math.lcm(alignment, itemsize) // itemsize
    joined: list[list[int]] = []
    for first, last in exact:
        start, end = first // step * step, min(-(-last // step) * step, numel)
        if joined and (start - joined[-1][1]) * itemsize <= gap:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    spans = tuple((start * itemsize, (end - start) * itemsize) for start, end in joined)
    return Needed(spans, used * itemsize)


def full_name(module: str, parameter: str) -> str:
    """The name of a module's parameter, as the model's ``named_parameters()`` has it."""
    return f"{module}.{parameter}" if module else parameter
