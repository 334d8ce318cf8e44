"""A plan narrowed to what this rank reads: the bytes that it needs, one run after another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from vllm_wt.loading.plan import GAP, Copy, LoadPlan, Needed
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta

Runs = tuple[tuple[int, int], ...]
"""Offset and length of each read in a full tensor, in bytes; sorted and apart."""


@dataclass(frozen=True)
class Slices:
    """What to read, and the plan that goes with it.

    Args:
        plan: Of the narrowed tensors, those that are needed. One that is needed in part is
            one-dimensional: its runs, one after another.
        runs: What to read of each tensor of ``plan.manifest``.
    """

    plan: LoadPlan
    runs: Mapping[str, Runs]

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.plan.manifest.nbytes


def sliced(plan: LoadPlan, gap: int = GAP, alignment: int = 1, most: int = 1 << 20) -> Slices:
    """Narrow a plan to what it reads.

    Args:
        plan: Of the full tensors.
        gap: Bytes. Two runs with no more between them are read as one.
        alignment: Bytes. Offsets and lengths are multiples of this, but for a tensor's end.
        most: Runs in all. With more of them, wider gaps are read too, up to whole tensors.
    """
    while True:
        needed = {
            tensor.name: need
            for tensor in plan.manifest.tensors
            if (need := plan.needed(tensor.name, gap, alignment)).runs or not tensor.nbytes
        }
        if not needed:  # a manifest is never empty
            first = plan.manifest.tensors[0]
            needed = {first.name: Needed(((0, first.nbytes),), first.nbytes)}
        if sum(len(need.runs) for need in needed.values()) <= max(most, len(needed)):
            return _narrowed(plan, needed)
        gap = max(4 * gap, GAP)


def _narrowed(plan: LoadPlan, needed: Mapping[str, Needed]) -> Slices:
    tensors: list[TensorMeta] = []
    parts: dict[str, _Part] = {}
    alike: dict[tuple[int, int], _Part] = {}  # many tensors have the very same runs
    for tensor in plan.manifest.tensors:
        if tensor.name not in needed:
            continue
        need = needed[tensor.name]
        nbytes = sum(length for _, length in need.runs)
        if nbytes != tensor.nbytes:
            itemsize = ITEMSIZE[tensor.dtype]
            key = (id(need), itemsize)
            if key not in alike:
                alike[key] = _Part(need.runs, itemsize)
            parts[tensor.name] = alike[key]
            tensor = replace(tensor, shape=(nbytes // itemsize,))  # noqa: PLW2901
        tensors.append(tensor)
    copies: list[Copy] = []
    for copy in plan.copies:
        part = parts.get(copy.source)
        copies.extend([copy] if part is None or not copy.numel else part.moved(copy))
    narrowed = replace(plan, manifest=Manifest(tuple(tensors)), copies=tuple(copies), unused=())
    return Slices(narrowed, {name: need.runs for name, need in needed.items()})


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a copy that reads at even distances: where it is in the copy, and what it reads."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class _Part:
    """Where the elements of a full tensor are in its runs, one after another."""

    def __init__(self, runs: Runs, itemsize: int) -> None:
        self._starts = torch.tensor([offset // itemsize for offset, _ in runs], device="cpu")
        lengths = torch.tensor([length // itemsize for _, length in runs], device="cpu")
        self._shift = lengths.cumsum(0) - lengths - self._starts
        self._found: dict[object, list[_Piece]] = {}

    def moved(self, copy: Copy) -> Iterator[Copy]:
        """The copy, reading from the runs: one, or several where these are unevenly spaced."""
        key = (copy.source_offset, copy.shape, copy.source_strides)
        if key not in self._found:
            self._found[key] = list(self._pieces(*key))
        for piece in self._found[key]:
            ahead = sum(
                n * stride for n, stride in zip(piece.first, copy.dest_strides, strict=True)
            )
            yield replace(
                copy,
                shape=piece.shape,
                source_offset=piece.offset,
                source_strides=piece.strides,
                dest_offset=copy.dest_offset + ahead,
            )

    def _pieces(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Iterator[_Piece]:
        # Elements that belong together by their strides are in one run; the outer loops go over runs.
        length, outer = 1, []
        for dim in sorted(range(len(strides)), key=strides.__getitem__):
            if strides[dim] <= length:
                length += (shape[dim] - 1) * strides[dim]
            else:
                outer.append(dim)
        outer.reverse()
        starts = torch.tensor(offset, device="cpu")
        for dim in outer:
            steps = torch.arange(shape[dim], device="cpu") * strides[dim]
            starts = starts.unsqueeze(-1) + steps
        run = torch.searchsorted(self._starts, starts, right=True) - 1
        whole = _Piece((0,) * len(shape), shape, offset, strides)
        yield from _regular(whole, outer, starts + self._shift[run])


def _regular(piece: _Piece, dims: list[int], starts: torch.Tensor) -> Iterator[_Piece]:
    """Cut a piece until its starts are evenly spaced in every dimension.

    Args:
        piece: What it reads is still to be settled.
        dims: The dimensions over whose indices ``starts`` runs, in that order.
        starts: Where each of its reads begins.
    """
    for n, dim in enumerate(dims):
        groups = list(_even(starts, n))
        if len(groups) > 1:
            for ahead, count in groups:
                first, shape = list(piece.first), list(piece.shape)
                first[dim] += ahead
                shape[dim] = count
                part = replace(piece, first=tuple(first), shape=tuple(shape))
                yield from _regular(part, dims, starts.narrow(n, ahead, count))
            return
    strides = list(piece.strides)
    for n, dim in enumerate(dims):
        if piece.shape[dim] > 1:
            strides[dim] = int(starts.diff(dim=n).flatten()[0])
    yield replace(piece, offset=int(starts.flatten()[0]), strides=tuple(strides))


def _even(starts: torch.Tensor, dim: int) -> Iterator[tuple[int, int]]:
    """First index and count of groups along a dimension that follow each other at one distance."""
    steps = starts.diff(dim=dim).movedim(dim, 0)
    steps = steps.reshape(len(steps), math.prod(steps.shape[1:]))
    first, count, distance = 0, 1, 0
    for least, most in zip(steps.amin(1).tolist(), steps.amax(1).tolist(), strict=True):
        if least == most and (count == 1 or least == distance):
            count, distance = count + 1, least
        else:
            yield first, count
            first, count = first + count, 1
    yield first, count
