"""A layout's run of bytes cut into buckets of one size, for whoever cannot send it whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_wt.errors import InvalidInfo, ManifestMismatch, OutOfBounds
from vllm_wt.packing.layout import Layout


class Piece(NamedTuple):
    """A part of a tensor that lies in one bucket; all in bytes.

    Args:
        bucket: Number of the bucket.
        offset: Where the part starts in the bucket.
        tensor_offset: Where it starts in the tensor.
        nbytes: Its size, one or more.
    """

    bucket: int
    offset: int
    tensor_offset: int
    nbytes: int


@dataclass(frozen=True)
class Buckets:
    """Cuts a layout every ``nbytes`` bytes. Tensors go on in the next bucket, none is too large.

    Args:
        layout: Where the tensors lie.
        nbytes: Size of a bucket: a multiple of the layout's alignment, so that what is aligned in
            the whole is so in its bucket.

    Raises:
        InvalidInfo: ``nbytes`` is not such a multiple.
    """

    layout: Layout
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.nbytes % self.layout.alignment:
            raise InvalidInfo(
                "A bucket cannot be of this size",
                where="packing",
                expected=f"a multiple of {self.layout.alignment} bytes",
                got=self.nbytes,
                cure="round it up",
            )

    @cached_property
    def count(self) -> int:
        """How many buckets there are; one at least."""
        return -(-self.layout.nbytes // self.nbytes)

    def size(self, number: int) -> int:
        """Bytes of a bucket: :attr:`nbytes`, or fewer in the last one; one at least.

        Raises:
            OutOfBounds: There is no bucket of this number.
        """
        if not 0 <= number < self.count:
            raise OutOfBounds(
                "There is no such bucket",
                where="packing",
                expected=f"0 to {self.count - 1}",
                got=number,
                cure="make both sides cut with the same manifest, alignment and bucket size",
            )
        return min(self.nbytes, self.layout.nbytes - number * self.nbytes)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The parts of a tensor, in its order; none of an empty one.

        Raises:
            ManifestMismatch: The manifest has no tensor of this name.
        """
        try:
            return self._pieces[name]
        except KeyError:
            raise ManifestMismatch(
                f"The tensor {name!r} has no place in the buckets",
                where="packing",
                expected="a tensor of the manifest",
                got=name,
                cure="connect again after changing what is sent",
            ) from None

    def padding(self, number: int) -> tuple[tuple[int, int], ...]:
        """Offset in the bucket and length of its bytes that belong to no tensor, in order.

        Raises:
            OutOfBounds: There is no bucket of this number.
        """
        self.size(number)
        return self._padding.get(number, ())

    @cached_property
    def _pieces(self) -> dict[str, tuple[Piece, ...]]:
        return {slot.tensor.name: self._cut(slot.offset, slot.nbytes) for slot in self.layout.slots}

    @cached_property
    def _padding(self) -> dict[int, tuple[tuple[int, int], ...]]:
        gaps: list[Piece] = []
        end = 0
        for slot in self.layout.slots:
            gaps += self._cut(end, slot.offset - end)
            end = slot.offset + slot.nbytes
        gaps += self._cut(end, self.layout.nbytes - end)
        found: dict[int, list[tuple[int, int]]] = {}
        for gap in gaps:
            found.setdefault(gap.bucket, []).append((gap.offset, gap.nbytes))
        return {bucket: tuple(each) for bucket, each in found.items()}

    def _cut(self, start: int, nbytes: int) -> tuple[Piece, ...]:
        """A range of the whole run, cut at the buckets' ends."""
        pieces, done = [], 0
        while done < nbytes:
            bucket, offset = divmod(start + done, self.nbytes)
            size = min(nbytes - done, self.nbytes - offset)
            pieces.append(Piece(bucket, offset, done, size))
            done += size
        return tuple(pieces)
