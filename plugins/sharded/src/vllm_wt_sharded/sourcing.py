"""A load plan that reads from the pieces that the trainer's ranks have, instead of full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_wt.errors import LoadError
from vllm_wt.loading.plan import Copy, Fallback, LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.strides import Regular, regular, rows_of


@dataclass(frozen=True)
class Taken:
    """A box that is taken from a piece.

    Args:
        piece: Its name; each rank's are its own.
        origin: First index of the piece in the full tensor.
        extent: The piece's size.
        start: First index of the box in the full tensor.
        size: The box's.
        shape: Of the full tensor.
    """

    piece: str
    origin: tuple[int, ...]
    extent: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_all(self) -> bool:
        """Whether the box, and the piece, is all of the full tensor."""
        return self.size == self.extent == self.shape

    @property
    def at(self) -> tuple[slice, ...]:
        """The box in the full tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def within(self) -> tuple[slice, ...]:
        """The box in the piece."""
        return tuple(
            slice(a - o, a - o + n)
            for a, o, n in zip(self.start, self.origin, self.size, strict=True)
        )


@dataclass(frozen=True)
class Sourced:
    """What a worker reads, and how the model's tensors come of it.

    Args:
        plan: Of the pieces. What is put together is read whole, for a fallback that it names; what
            other modules take of that, they take from the full tensor.
        together: Full tensors that the model's own loaders want, and what each consists of.
    """

    plan: LoadPlan
    together: Mapping[str, tuple[Taken, ...]]


def sourced(
    plan: LoadPlan, taken: Mapping[str, Sequence[Taken]], pieces: Sequence[TensorMeta]
) -> Sourced:
    """Rewrite a plan.

    Args:
        plan: Of the full tensors.
        taken: For each tensor that is needed, boxes that have all that is needed, none of it twice.
        pieces: That boxes are taken from, in the order in which they are read.

    Raises:
        LoadError: Something that the plan reads is in none of the boxes.
    """
    whole = {name for fallback in plan.fallbacks.values() for name in fallback.sources}
    together = {
        tensor.name: tuple(taken.get(tensor.name, ()))
        for tensor in plan.manifest.tensors
        if tensor.name in whole or not tensor.nbytes
    }
    places = _Places(plan, taken)
    copies = [
        moved
        for copy in plan.copies
        for moved in ([copy] if copy.source in together else places.moved(copy))
    ]
    parts = tuple(each.piece for boxes in together.values() for each in boxes)
    fallbacks = {"": Fallback("", ("put together from pieces",), parts)} if parts else {}
    read = LoadPlan(Manifest(tuple(pieces)), tuple(copies), (), plan.parameters, fallbacks, ())
    return Sourced(read, together)


class _Places:
    """Where the elements of full tensors are in pieces."""

    def __init__(self, plan: LoadPlan, taken: Mapping[str, Sequence[Taken]]) -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in plan.manifest.tensors}
        self._taken = taken
        # A model's layers, and their experts, are alike.
        self._runs: dict[object, _Runs] = {}
        self._found: dict[object, list[tuple[int, Regular]]] = {}

    def moved(self, copy: Copy) -> Iterator[Copy]:
        """The copy, from the pieces; several where they, or their strides, differ."""
        boxes = self._taken.get(copy.source, ())
        form = tuple((box.origin, box.extent, box.start, box.size) for box in boxes)
        runs_key = (self._shapes[copy.source], form)
        read = (copy.source_offset, copy.shape, copy.source_strides, copy.dest_strides)
        key = (runs_key, read)
        if key not in self._found:
            if runs_key not in self._runs:
                self._runs[runs_key] = _Runs(self._shapes[copy.source], boxes)
            self._found[key] = list(self._runs[runs_key].moved(copy))
        for box, part in self._found[key]:
            yield replace(
                copy,
                source=boxes[box].piece,
                source_offset=part.source,
                source_strides=tuple(source for _, source, _ in part.dims),
                dest_offset=copy.dest_offset + part.dest,
                dest_strides=tuple(dest for _, _, dest in part.dims),
                shape=tuple(count for count, _, _ in part.dims),
            )


class _Runs:
    """Boxes of one tensor as runs of elements that follow each other, in it and in the piece."""

    def __init__(self, shape: tuple[int, ...], boxes: Sequence[Taken]) -> None:
        found = [_runs(shape, box) for box in boxes]
        start = np.concatenate([each[0] for each in found]) if found else np.empty(0, np.int64)
        order = np.argsort(start, kind="stable")
        self._start: Ints = start[order]
        if found:
            self._place: Ints = np.concatenate([each[1] for each in found])[order]
            counts = [len(each[0]) for each in found]
            self._length: Ints = np.repeat([each[2] for each in found], counts)[order]
            self._box: Ints = np.repeat(np.arange(len(found)), counts)[order]

    def moved(self, copy: Copy) -> Iterator[tuple[int, Regular]]:
        """The copy's elements in the boxes: which box, and where in its piece."""
        rows = rows_of(copy)
        if not len(self._start):
            raise _orphan(copy)
        first = np.searchsorted(self._start, rows.source, side="right") - 1
        last = np.searchsorted(self._start, rows.source + rows.length - 1, side="right") - 1
        count = last - first + 1
        row = np.repeat(np.arange(len(count)), count)
        run = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + first[row]
        begin = np.maximum(rows.source[row], self._start[run])
        end = np.minimum(rows.source[row] + rows.length, self._start[run] + self._length[run])
        if (first < 0).any() or (end <= begin).any() or (end - begin).sum() != copy.numel:
            raise _orphan(copy)
        source = self._place[run] + begin - self._start[run]
        dest = rows.dest[row] + (begin - rows.source[row]) * rows.stride
        for box in np.unique(self._box[run]).tolist():
            here = np.flatnonzero(self._box[run] == box)
            parts = regular(source[here], dest[here], (end - begin)[here], rows.stride)
            yield from ((box, part) for part in parts)


def _runs(shape: tuple[int, ...], box: Taken) -> tuple[Ints, Ints, int]:
    """Where each run begins in the full tensor and in the piece, and how long they are."""
    length, inner = 1, len(shape)
    while inner > 0:
        inner -= 1
        length *= box.size[inner]
        if box.size[inner] != shape[inner]:
            break
    start = place = np.zeros(1, dtype=np.int64)
    full, part = _strides(shape), _strides(box.extent)
    for dim in range(len(shape)):
        # Within a run only its first element counts.
        steps = np.arange(box.size[dim] if dim < inner else 1) + box.start[dim]
        start = (start[:, None] + steps * full[dim]).reshape(-1)
        place = (place[:, None] + (steps - box.origin[dim]) * part[dim]).reshape(-1)
    return start, place, length


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def _orphan(copy: Copy) -> LoadError:
    return LoadError(
        f"A part of tensor {copy.source!r} that the model needs was not planned for",
        where="plan",
        expected="boxes with all that is needed",
        got=f"others, for {copy.destination!r}",
        cure="this is a bug of the backend: report it to its authors",
    )
