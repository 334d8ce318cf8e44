"""The plan: which bytes go from which source to which worker, the same in every round."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_wt.errors import InvalidInfo
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.pieces import PieceTable


@dataclass(frozen=True, eq=False)
class Rows:
    """All that one worker takes, layer by layer; the rows of one tensor are together.

    Args:
        worker: Its rank.
        need: (n,) int32, which of the worker's needs: its place among the rows of this rank in the
            layout that was planned for.
        source_row: (n,) int32, row of the source layout that it is taken from.
        source_rank: (n,) int32, that row's rank.
        tensor: (n,) int32, index into the layout's tensors.
        start: (n, dims) int64, first index, in the full tensor.
        size: (n, dims) int64.
        nbytes: (n,) int64.
    """

    worker: int
    need: npt.NDArray[np.int32]
    source_row: npt.NDArray[np.int32]
    source_rank: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    start: Ints
    size: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.need)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all columns, as hex."""
        digest = hashlib.sha256(b"%d %d\n" % (self.worker, len(self)))
        for narrow in (self.need, self.source_row, self.source_rank, self.tensor):
            digest.update(np.ascontiguousarray(narrow, dtype="<i4").data)
        for wide in (self.start, self.size, self.nbytes):
            digest.update(np.ascontiguousarray(wide, dtype="<i8").data)
        return digest.hexdigest()

    def batches(self, nbytes: int) -> list[slice]:
        """Consecutive rows, whole tensors only, of at most ``nbytes``; or one tensor that has more."""
        ends = np.append(np.flatnonzero(np.diff(self.tensor)) + 1, len(self))
        total = np.cumsum(self.nbytes)
        found, begin = [], 0
        while begin < len(self):
            before = total[begin - 1] if begin else 0
            first = int(np.searchsorted(ends, begin, side="right"))
            last = int(np.searchsorted(total[ends - 1], before + nbytes, side="right")) - 1
            end = int(ends[max(first, last)])
            found.append(slice(begin, end))
            begin = end
        return found


@dataclass(frozen=True, eq=False)
class Share:
    """One worker's part of a plan as it is kept; `Plan.for_worker` spells it out.

    Args:
        need: (needs,) int32, see :class:`Rows`, in the order in which they are taken.
        tensor: (needs,) int32.
        pattern: (needs,) int32, into ``pieces``.
        source_row: (n,) int32, of each piece of each need.
        pieces: The patterns; common to many workers.
        given: (ranks,) int64, bytes from each source.
    """

    need: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    pattern: npt.NDArray[np.int32]
    source_row: npt.NDArray[np.int32]
    pieces: PieceTable
    given: Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """What every worker takes, and from where.

    Args:
        source: What the sources hold.
        by_worker: Each worker's share, by its rank.
    """

    source: Layout
    by_worker: Mapping[int, Share]

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers' ranks, ascending."""
        return tuple(sorted(self.by_worker))

    def for_worker(self, worker: int) -> Rows:
        """What one worker takes.

        Raises:
            InvalidInfo: The plan has no such worker.
        """
        self.require_workers([worker])
        share = self.by_worker[worker]
        which, piece = share.pieces.expanded(share.pattern)
        tensor = share.tensor[which]
        return Rows(
            worker,
            share.need[which],
            share.source_row,
            self.source.rank[share.source_row],
            tensor,
            share.pieces.start[piece],
            share.pieces.size[piece],
            share.pieces.elements[piece] * self.source.itemsizes[tensor],
        )

    def batches(self, worker: int, nbytes: int) -> list[slice]:
        """Slices of `for_worker`'s rows that bound the memory in flight; see `Rows.batches`."""
        return self.for_worker(worker).batches(nbytes)

    def require_workers(self, workers: list[int]) -> None:
        """Raise :class:`InvalidInfo` where the plan lacks one of these."""
        for worker in workers:
            if worker not in self.by_worker:
                raise InvalidInfo(
                    f"The plan has no worker {worker}",
                    backend=BACKEND,
                    where=f"worker {worker}",
                    expected=f"one of {len(self.by_worker)} workers",
                    got=worker,
                    cure="plan for the worker's needs first",
                )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the sources' layout and every worker's rows, as hex."""
        digest = hashlib.sha256(self.source.digest.encode())
        for worker in self.workers:
            digest.update(self.for_worker(worker).digest.encode())
        return digest.hexdigest()

    @cached_property
    def matrix(self) -> Ints:
        """(ranks, workers) int64, bytes from each source to each worker, in their order."""
        given = [self.by_worker[worker].given for worker in self.workers]
        matrix: Ints = np.array(given, dtype=np.int64).reshape(len(given), self.source.ranks).T
        return matrix

    @property
    def bytes_out(self) -> Ints:
        """(ranks,) int64, bytes that each source gives."""
        total: Ints = self.matrix.sum(axis=1)
        return total

    @property
    def bytes_in(self) -> Ints:
        """(workers,) int64, bytes that each worker takes, in their order."""
        total: Ints = self.matrix.sum(axis=0)
        return total

    @property
    def busiest(self) -> int:
        """Bytes over the busiest link, of all sources and workers."""
        return int(max(self.bytes_out.max(initial=0), self.bytes_in.max(initial=0)))

    def skew(self) -> tuple[float, float]:
        """The most over the mean, of what sources give and of what workers take; 0 for nothing."""
        sides = (self.bytes_out, self.bytes_in)
        out, into = (float(each.max() / each.mean()) if each.any() else 0.0 for each in sides)
        return out, into

    def without_workers(self, workers: list[int]) -> Plan:
        """The plan when these have left; what the others take stays as it is.

        Raises:
            InvalidInfo: The plan has no such worker.
        """
        self.require_workers(workers)
        left = {w: share for w, share in self.by_worker.items() if w not in set(workers)}
        return Plan(self.source, left)
