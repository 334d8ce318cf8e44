"""Where the elements of a tensor come from: a checkpoint tensor, or a copy of regions of others.

Views are not here: a view is an offset and strides over one of these, whatever made it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_wt.loading.plan import Cast
from vllm_wt.loading.regions import Loop

MAX_PIECES = 4096
"""Strided copies that one copy of the model may take; with more it is not worth recording."""


class NoRegionError(Exception):
    """The elements are not copies of elements of the checkpoint, at least not of few regions."""


class Origin:
    """Memory that recorded tensors are views of."""

    __slots__ = ("_spoilers", "constant", "spoiled")

    def __init__(self) -> None:
        self.spoiled: str | None = None
        """Why it no longer holds what it was made with: something wrote to it."""
        self.constant: bool | int | float | complex | None = None
        """What all of it holds since the last write."""
        self._spoilers: frozenset[str] = frozenset()

    def names(self) -> Iterator[str]:
        """The checkpoint tensors that it depends on."""
        yield from self._spoilers
        yield from self._made_of()

    def _made_of(self) -> Iterator[str]:
        raise NotImplementedError

    def spoil(self, reason: str, names: frozenset[str]) -> None:
        """Something that depends on ``names`` wrote to it."""
        self.spoiled = self.spoiled or reason
        self.constant = None
        self._spoilers |= names


class Source(Origin):
    """A checkpoint tensor: contiguous, from element 0."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def _made_of(self) -> Iterator[str]:
        yield self.name


class Opaque(Origin):
    """The result of an operation that computes."""

    __slots__ = ("_names", "reason")

    def __init__(self, reason: str, names: frozenset[str]) -> None:
        super().__init__()
        self.reason = reason
        self._names = names

    def _made_of(self) -> Iterator[str]:
        yield from self._names


class Bits(Origin):
    """The same memory, its elements taken for another dtype of the same size."""

    __slots__ = ("base", "cast")

    def __init__(self, base: Origin, cast: Cast) -> None:
        super().__init__()
        self.base = base
        self.cast = cast

    def _made_of(self) -> Iterator[str]:
        return self.base.names()

    def spoil(self, reason: str, names: frozenset[str]) -> None:
        super().spoil(reason, names)
        self.base.spoil(reason, names)


@dataclass(frozen=True)
class Part:
    """What fills a slab of a made tensor: a view, one stride for each of its dimensions.

    Args:
        stop: Where the slab ends along the axis; it starts where the one before ends.
        origin: What the view is of.
        offset: The element of the origin that the slab's first element is.
        strides: In the origin, for each dimension of the made tensor.
    """

    stop: int
    origin: Origin
    offset: int
    strides: tuple[int, ...]


Step = tuple[Origin, int, int, tuple[Loop, ...]]
"""What to read, from where, to write where, and how to go on from there."""


@dataclass(frozen=True)
class Piece:
    """One strided copy from a checkpoint tensor: offsets in elements, loops, casts in order."""

    name: str
    read: int
    write: int
    loops: tuple[Loop, ...]
    casts: tuple[Cast, ...]


class Made(Origin):
    """New memory without gaps, filled from other tensors in slabs along one axis.

    Args:
        sizes: Its shape.
        strides: Its strides, which may be those of any order of its dimensions.
        axis: The dimension that the slabs follow each other along.
        parts: The slabs; together they fill all of it.
        cast: What happened to each element.
    """

    __slots__ = ("_axes", "_axis", "_parts", "_stops", "cast")

    def __init__(
        self,
        sizes: Sequence[int],
        strides: Sequence[int],
        axis: int,
        parts: Sequence[Part],
        cast: Cast | None,
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._stops = [part.stop for part in parts]
        self.cast = cast
        # Of the dimensions that have a stride to speak of, outermost first.
        order = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -strides[d])
        self._axes = [(d, sizes[d], strides[d]) for d in order]
        # With one slab there is no boundary to look for.
        self._axis = order.index(axis) if len(parts) > 1 else -1

    @staticmethod
    def fits(sizes: Sequence[int], strides: Sequence[int]) -> bool:
        """Whether memory of this layout has no gaps and no overlaps."""
        dense = 1
        for stride, size in sorted((r, n) for n, r in zip(sizes, strides, strict=True) if n != 1):
            if stride != dense:
                return False
            dense *= size
        return True

    def _made_of(self) -> Iterator[str]:
        for part in self._parts:
            yield from part.origin.names()

    def trace(self, read: int, write: int, loops: Sequence[Loop]) -> Iterator[Step]:
        """Express a strided read of this memory by reads of what filled it.

        Raises:
            NoRegionError: It takes too many.
        """
        work = [(read, write, tuple(loops))]
        count = 0
        while work:
            read, write, loops = work.pop()
            start = self._digits(read)
            steps = [self._digits(loop[1]) for loop in loops]
            limits = [size for _, size, _ in self._axes]
            slab = 0
            if self._axis >= 0:
                slab = bisect_right(self._stops, start[self._axis])
                limits[self._axis] = self._stops[slab]
            crossed = _first_crossed(start, steps, loops, limits)
            if crossed is None:
                count += 1
                if count > MAX_PIECES:
                    raise NoRegionError(f"a copy in more than {MAX_PIECES} pieces")
                yield self._step(slab, start, steps, write, loops)
            else:
                size = self._axes[crossed][1]
                work += _cut(read, write, loops, start, steps, crossed, limits[crossed], size)

    def _digits(self, distance: int) -> list[int]:
        """A distance in this memory as a number of steps along each axis, as one counts."""
        digits = []
        for _, _, stride in self._axes:
            digit, distance = divmod(distance, stride)
            digits.append(digit)
        return digits

    def _step(
        self,
        slab: int,
        start: Sequence[int],
        steps: Sequence[Sequence[int]],
        write: int,
        loops: Sequence[Loop],
    ) -> Step:
        part = self._parts[slab]
        strides = [part.strides[dim] for dim, _, _ in self._axes]
        read = part.offset + sum(d * s for d, s in zip(start, strides, strict=True))
        if slab:
            read -= self._stops[slab - 1] * strides[self._axis]
        moved = tuple(
            (count, sum(d * s for d, s in zip(step, strides, strict=True)), w)
            for (count, _, w), step in zip(loops, steps, strict=True)
        )
        return part.origin, read, write, moved


def _first_crossed(
    start: Sequence[int], steps: Sequence[Sequence[int]], loops: Sequence[Loop], limits: list[int]
) -> int | None:
    """The innermost axis at whose end the loops don't stop: there the next one would carry."""
    for axis in range(len(limits) - 1, -1, -1):
        reach = start[axis]
        for loop, step in zip(loops, steps, strict=True):
            reach += (loop[0] - 1) * step[axis]
        if reach >= limits[axis]:
            return axis
    return None


def _cut(
    read: int,
    write: int,
    loops: Sequence[Loop],
    start: Sequence[int],
    steps: Sequence[Sequence[int]],
    axis: int,
    limit: int,
    size: int,
) -> list[tuple[int, int, tuple[Loop, ...]]]:
    """Take one loop that crosses the end of an axis in parts; each crosses less often."""
    which = max(
        (n for n, loop in enumerate(loops) if loop[0] > 1), key=lambda n: (steps[n][axis], n)
    )
    count, r, w = loops[which]
    step = steps[which][axis]
    before, after = tuple(loops[:which]), tuple(loops[which + 1 :])
    around, rest = divmod(size, step)
    if limit == size and not rest and start[axis] < step and count > around and around > 1:
        # It goes around the axis in whole rounds: two loops, the outer one along the next axis.
        rounds, left = divmod(count, around)
        body = (rounds, r * around, w * around), (around, r, w)
        parts = [(read, write, (*before, *body, *after))]
        done = rounds * around
    else:
        done = min(max((limit - 1 - start[axis]) // step + 1, 1), count - 1)
        left = count - done
        parts = [(read, write, (*before, (done, r, w), *after))]
    if left:
        parts.append((read + done * r, write + done * w, (*before, (left, r, w), *after)))
    return parts


def pieces(origin: Origin, read: int, write: int, loops: Sequence[Loop]) -> list[Piece]:
    """Express a strided copy by copies from checkpoint tensors.

    Args:
        origin: What is read.
        read: Its first element that is.
        write: Where the first element goes.
        loops: How both sides go on.

    Raises:
        NoRegionError: With the reason.
    """
    found: list[Piece] = []
    work: list[tuple[Step, tuple[Cast, ...]]] = [((origin, read, write, tuple(loops)), ())]
    while work:
        (origin, read, write, loops), casts = work.pop()
        if origin.spoiled is not None:
            raise NoRegionError(origin.spoiled)
        if isinstance(origin, Source):
            found.append(Piece(origin.name, read, write, tuple(loops), casts))
            if len(found) > MAX_PIECES:
                raise NoRegionError(f"a copy in more than {MAX_PIECES} pieces")
        elif isinstance(origin, Bits):
            work.append(((origin.base, read, write, tuple(loops)), (origin.cast, *casts)))
        elif isinstance(origin, Made):
            casts = casts if origin.cast is None else (origin.cast, *casts)
            work += [(step, casts) for step in origin.trace(read, write, loops)]
        elif isinstance(origin, Opaque):
            raise NoRegionError(origin.reason)
    return found
