"""What workers need, as pieces with owners; and all of it as groups of bytes to be shared out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.balance import Group
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.cuts import Cuts
from vllm_wt_sharded.layers import layer_order
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.owners import Owners
from vllm_wt_sharded.places import Places


@dataclass(frozen=True)
class WorkerPieces:
    """The pieces of one worker's needs, layer by layer.

    Args:
        worker: Its rank.
        viewpoint: Which of the distinct places workers have; see `Demand`.
        need: (needs,) int32, in the order in which they are taken: place among the worker's rows.
        tensor: (needs,) int32.
        pattern: (needs,) int32.
        piece: (n,), index into the table of pieces.
        slot: (n,), see `Owners`.
        nbytes: (n,).
    """

    worker: int
    viewpoint: int
    need: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    pattern: npt.NDArray[np.int32]
    piece: Ints
    slot: Ints
    nbytes: Ints


class Demand:
    """All needs of some workers.

    Args:
        source: What the sources hold.
        needs: What the workers need.
        places: Where they are; None for all equally far.

    Raises:
        ManifestMismatch: Nobody holds a part of a need.
    """

    def __init__(self, source: Layout, needs: Layout, places: Places | None) -> None:
        self.cuts = Cuts.of(source.signatures, needs)
        self.owners = Owners.of(source.signatures, self.cuts.covers, source.rank)
        self._needs = needs
        self._by_worker = np.argsort(needs.rank, kind="stable")
        self._workers, self._first = np.unique(needs.rank[self._by_worker], return_index=True)
        self._order = layer_order(needs.tensors).astype(np.int32)
        distances = (places or Places()).distances(source.ranks, self._workers.tolist())
        self._seen, viewpoints = np.unique(distances, axis=0, return_inverse=True)
        self._viewpoints = viewpoints.reshape(-1)
        self._sum_up()

    def _sum_up(self) -> None:
        """Group the bytes by who has them, and how far these are from who needs them."""
        sets = len(self.owners.sets)
        nbytes = np.zeros((len(self._seen), sets))
        pieces = np.zeros((len(self._seen), sets), dtype=np.int64)
        largest = np.zeros((len(self._seen), sets), dtype=np.int64)
        self.busiest_in = 0
        for each in self.workers():
            of = self.owners.owner_set[each.slot]
            nbytes[each.viewpoint] += np.bincount(of, each.nbytes, sets)
            pieces[each.viewpoint] += np.bincount(of, minlength=sets)
            np.maximum.at(largest[each.viewpoint], of, each.nbytes)
            self.busiest_in = max(self.busiest_in, int(each.nbytes.sum()))
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        for viewpoint, owner_set in np.argwhere(pieces).tolist():
            owners = self.owners.sets[owner_set]
            far = self._seen[viewpoint][owners]
            key = (tuple(owners.tolist()), tuple((far - far.min()).tolist()))
            found.setdefault(key, []).append((viewpoint, owner_set))
        self._group = np.zeros((len(self._seen), sets), dtype=np.int64)
        self.groups: list[Group] = []
        counts, most = [], []
        for key in sorted(found, key=lambda key: (len(key[0]), key)):
            where = tuple(np.array(found[key]).T)
            self._group[where] = len(self.groups)
            self.groups.append(Group(key[0], int(nbytes[where].sum()), key[1]))
            counts.append(pieces[where].sum())
            most.append(largest[where].max())
        self.pieces = np.array(counts, dtype=np.int64)
        """(groups,), how many pieces each has."""
        self.largest = np.array(most, dtype=np.int64)
        """(groups,), bytes of the largest piece of each."""

    def workers(self) -> Iterator[WorkerPieces]:
        """Every worker's pieces, by rank. Spelt out one at a time: all together take gigabytes."""
        table, cuts = self.cuts.pieces, self.cuts
        bounds = np.append(self._first, len(self._by_worker))
        for i, worker in enumerate(self._workers.tolist()):
            rows = self._by_worker[bounds[i] : bounds[i + 1]]
            need = np.argsort(self._order[self._needs.tensor[rows]], kind="stable")
            rows = rows[need]
            tensor, pattern = self._needs.tensor[rows], cuts.pattern[rows]
            which, piece = table.expanded(pattern)
            slot = self.owners.slot_first[tensor][which] + cuts.cover[piece]
            nbytes = table.elements[piece] * self._needs.itemsizes[tensor][which]
            viewpoint = int(self._viewpoints[i])
            yield WorkerPieces(
                worker, viewpoint, need.astype(np.int32), tensor, pattern, piece, slot, nbytes
            )

    def group_of(self, pieces: WorkerPieces) -> Ints:
        """(n,), the group of each piece, index into ``groups``."""
        group: Ints = self._group[pieces.viewpoint][self.owners.owner_set[pieces.slot]]
        return group
