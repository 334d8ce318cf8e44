"""The pieces of one rank as tensors of their own, which a Transport's trainer can expose."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.source import WeightSource
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.sources import Piece, ShardedSource


class PiecesSource(WeightSource):
    """The pieces that a rank has, always the same boxes, in the same order.

    Args:
        sharded: Says what they are.

    Raises:
        ManifestMismatch, InvalidInfo: Of the source; or the rank has none.
    """

    def __init__(self, sharded: ShardedSource) -> None:
        self._sharded = sharded
        self._now: list[Piece] | None = sharded.pieces()
        self._is_given = True
        """Whether what was looked at last is what was asked for last."""
        rows = ((p.name, sharded.rank, p.start, tuple(p.tensor.shape)) for p in self._now)
        self.layout = Layout.of(sharded.tensors, rows)
        """What this rank holds."""
        self._boxes = _boxes(self._now)
        self._metas = piece_metas(self.layout, sharded.rank)
        names = zip(self._metas, self._now, strict=True)
        self._made = frozenset(meta.name for meta, p in names if p.name in sharded.made)

    def manifest(self) -> Manifest:
        if not self._metas:
            raise ManifestMismatch(
                "This rank of the trainer holds nothing",
                backend=BACKEND,
                where=f"rank {self._sharded.rank}",
                expected="a part of a tensor on each rank",
                got="none",
                cure="leave this rank out of the group",
            )
        return Manifest(self._metas)

    def begin(self) -> None:
        """Look at what there is now, for a round. Where the source makes any, all ranks do so."""
        self._is_given = False
        self._now = self._sharded.pieces()
        if (now := _boxes(self._now)) != self._boxes:
            changed = next((p for p, was in zip(now, self._boxes, strict=False) if p != was), None)
            raise ManifestMismatch(
                "This rank of the trainer does not hold what it did when it connected",
                backend=BACKEND,
                where=f"rank {self._sharded.rank}",
                expected=f"{len(self._boxes)} pieces, where they were",
                got=f"{changed}" if changed else f"{len(now)} pieces",
                cure="connect again on all ranks after changing how the weights are sharded",
            )

    def end(self) -> None:
        """The round is over: nothing that was made for it is needed any more."""
        self._now = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._now is None:
            self.begin()
        assert self._now is not None
        for meta, piece in zip(self._metas, self._now, strict=True):
            yield meta.name, piece.tensor

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._now is None:
            self.begin()
        self._is_given = True
        return iter(self)

    def is_same(self) -> bool:
        return self._is_given and self._sharded.is_same()

    @property
    def device(self) -> torch.device:
        return self._sharded.device

    @property
    def made(self) -> frozenset[str]:
        return self._made


def piece_metas(layout: Layout, rank: int) -> tuple[TensorMeta, ...]:
    """A rank's pieces, by names that no other piece has.

    Args:
        layout: With the rows of this rank, in order.
        rank: Which.
    """
    found = []
    for number, row in enumerate(layout.rows_of(rank).tolist()):
        meta = layout.tensors[layout.tensor[row]]
        shape = tuple(layout.size[row, : len(meta.shape)].tolist())
        found.append(TensorMeta(f"{meta.name} (rank {rank}, {number})", meta.dtype, shape))
    return tuple(found)


def _boxes(pieces: list[Piece]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(piece.name, piece.start, tuple(piece.tensor.shape)) for piece in pieces]
