"""Which ranks have each piece, and in which of their rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.patterns import numbered_lists
from vllm_wt_sharded.signatures import Signatures


@dataclass(frozen=True)
class Owners:
    """The owners of every cover of every tensor. A *slot* is one tensor and one of its covers.

    Args:
        slot_first: (tensors,), each tensor's first slot; its covers follow in their order.
        owner_set: (slots,), which set of ranks has it.
        sets: The sets, each ascending.
        row_at: (slots,), where its rows begin in ``rows``: one of each owner, in the set's order.
        rows: Rows of the source layout.
    """

    slot_first: Ints
    owner_set: Ints
    sets: list[Ints]
    row_at: Ints
    rows: Ints

    @classmethod
    def of(
        cls,
        signatures: Signatures,
        covers: list[list[tuple[int, ...]]],
        rank: npt.NDArray[np.int32],
    ) -> Owners:
        """The owners of these covers of each signature; ``rank`` is the source layout's column."""
        counts = np.array([len(each) for each in covers], dtype=np.int64)[signatures.of_tensor]
        slot_first = np.cumsum(counts) - counts
        row_at = np.zeros(int(counts.sum()), dtype=np.int64)
        row_count = np.zeros_like(row_at)
        several: list[Ints] = []
        end = len(signatures.rows)
        by_signature = np.argsort(signatures.of_tensor, kind="stable")
        bounds = np.searchsorted(signatures.of_tensor[by_signature], np.arange(len(covers) + 1))
        for signature, own in enumerate(covers):
            tensors = by_signature[bounds[signature] : bounds[signature + 1]]
            for i, cover in enumerate(own):
                slots = slot_first[tensors] + i
                pairs = signatures.pair_first[tensors, None] + np.array(cover)
                if len(cover) == 1:
                    row_at[slots] = signatures.row_first[pairs[:, 0]]
                    row_count[slots] = signatures.row_first[pairs[:, 0] + 1] - row_at[slots]
                    continue
                for slot, boxes in zip(slots.tolist(), pairs, strict=True):
                    rows = _one_of_each_rank(signatures, boxes, rank)
                    row_at[slot], row_count[slot] = end, len(rows)
                    several.append(rows)
                    end += len(rows)
        pool = np.concatenate([signatures.rows, *several])
        first = np.append(np.cumsum(row_count) - row_count, row_count.sum())
        each = np.repeat(row_at - first[:-1], row_count) + np.arange(first[-1])
        owner_set, sets = numbered_lists(rank[pool[each]].astype(np.int64), first)
        return cls(slot_first, owner_set, sets, row_at, pool)


def _one_of_each_rank(signatures: Signatures, pairs: Ints, rank: npt.NDArray[np.int32]) -> Ints:
    rows = np.concatenate(
        [
            signatures.rows[signatures.row_first[pair] : signatures.row_first[pair + 1]]
            for pair in pairs.tolist()
        ]
    )
    _, first = np.unique(rank[rows], return_index=True)
    return rows[first]
