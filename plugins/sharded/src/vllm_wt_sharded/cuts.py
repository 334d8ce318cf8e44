"""How needs are cut by what the sources hold: into pieces with the same owners throughout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_wt.errors import ManifestMismatch
from vllm_wt_sharded.boxes import Ints, cells
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.patterns import numbered
from vllm_wt_sharded.pieces import PieceTable
from vllm_wt_sharded.signatures import Signatures


@dataclass(frozen=True)
class Cuts:
    """The needs' patterns. A *cover* is a set of boxes that sources have of a tensor.

    Args:
        pieces: The patterns.
        pattern: (needs,) int32, each need's.
        cover: (pieces,), which of its signature's covers has each piece.
        covers: For each signature its covers, each as indices into the signature's boxes.
        mergeable: (patterns,), whether one source's box may turn out to give several pieces.
    """

    pieces: PieceTable
    pattern: npt.NDArray[np.int32]
    cover: Ints
    covers: list[list[tuple[int, ...]]]
    mergeable: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, signatures: Signatures, needs: Layout) -> Cuts:
        """Cut all needs.

        Raises:
            ManifestMismatch: Names the first need of which nobody holds a part, and the part.
        """
        own_signature = signatures.of_tensor[needs.tensor].astype(np.int32)
        pattern, firsts = numbered([own_signature, *needs.start.T, *needs.size.T])
        pieces = PieceTable(needs.start.shape[1])
        covers: list[dict[tuple[int, ...], int]] = [{} for _ in signatures.boxes]
        cover: list[int] = []
        mergeable: list[bool] = []
        for need in firsts.tolist():
            signature = int(own_signature[need])
            boxes = signatures.boxes[signature]
            cut = cells(
                needs.start[need],
                needs.size[need],
                signatures.box_start[boxes],
                signatures.box_size[boxes],
            )
            if () in cut.covers:  # patterns are numbered as they occur: it is the first such need
                i = cut.covers.index(())
                raise _orphaned(needs, need, cut.start[i], cut.size[i])
            pieces.add(cut.start, cut.size)
            known = covers[signature]
            cover.extend(known.setdefault(each, len(known)) for each in cut.covers)
            used = [box for each in cut.covers for box in each]
            mergeable.append(len(used) > len(set(used)))
        return cls(
            pieces,
            pattern.astype(np.int32),
            np.array(cover, dtype=np.int64),
            [list(each) for each in covers],
            np.array(mergeable, dtype=bool),
        )


def _orphaned(needs: Layout, need: int, start: Ints, size: Ints) -> ManifestMismatch:
    tensor, worker = int(needs.tensor[need]), int(needs.rank[need])
    return ManifestMismatch(
        f"Nobody holds a part of the tensor {needs.tensors[tensor].name!r} that a worker needs",
        backend=BACKEND,
        where=f"{needs.box_text(tensor, start, size)}, worker {worker}",
        expected="an owner of every element",
        got="none",
        cure="have every rank of the trainer announce all that it holds, and check the mesh and the "
        "placements",
    )
