"""Lists of boxes that many needs have in common, each list once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.boxes import Ints


class PieceTable:
    """Patterns: lists of disjoint boxes that together are the box of a need. More can be added.

    Args:
        dims: Dimensions of every box.
    """

    def __init__(self, dims: int) -> None:
        self._boxes = [np.empty((2, 0, dims), dtype=np.int64)]
        self._counts: list[int] = []
        self._number: dict[bytes, int] = {}
        self._update()

    def _update(self) -> None:
        boxes = np.concatenate(self._boxes, axis=1)
        self._boxes = [boxes]
        self._first: Ints = np.cumsum([0, *self._counts], dtype=np.int64)
        self._start: Ints = boxes[0]
        self._size: Ints = boxes[1]
        self._elements: Ints = boxes[1].prod(axis=1)

    def add(self, start: Ints, size: Ints) -> int:
        """The number of a new pattern of these boxes, (pieces, dims) each."""
        self._boxes.append(np.stack([start, size]))
        self._counts.append(len(start))
        return len(self._counts) - 1

    def find(self, start: Ints, size: Ints) -> int:
        """The number of the pattern of these boxes that `find` has added, now or before."""
        key = np.stack([start, size]).tobytes()
        if key not in self._number:
            self._number[key] = self.add(start, size)
        return self._number[key]

    @property
    def first(self) -> Ints:
        """(patterns + 1,), the first piece of each."""
        self._current()
        return self._first

    @property
    def start(self) -> Ints:
        """(pieces, dims), first index."""
        self._current()
        return self._start

    @property
    def size(self) -> Ints:
        """(pieces, dims)."""
        self._current()
        return self._size

    @property
    def elements(self) -> Ints:
        """(pieces,), how many each has."""
        self._current()
        return self._elements

    def _current(self) -> None:
        if len(self._boxes) > 1:
            self._update()

    def expanded(self, patterns: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
        """The pieces of all these patterns in turn: which of these they are of, and their numbers.

        Returns:
            (n,) indices into ``patterns``, and (n,) indices of pieces.
        """
        counts = np.diff(self.first)[patterns]
        which = np.repeat(np.arange(len(patterns)), counts)
        begin = np.cumsum(counts) - counts
        return which, np.arange(len(which)) + (self.first[patterns] - begin)[which]
