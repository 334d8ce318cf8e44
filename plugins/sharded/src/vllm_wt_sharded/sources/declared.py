"""Shards that the trainer declares itself, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index

import torch

from vllm_wt.errors import InvalidInfo, shown
from vllm_wt.manifest import TensorMeta
from vllm_wt.packing import meta_of
from vllm_wt_sharded.layout import BACKEND
from vllm_wt_sharded.sources.base import Piece, ShardedSource
from vllm_wt_sharded.sources.looks import Look
from vllm_wt_sharded.sources.plain import require_plain

Declared = tuple[Sequence[int], Sequence[int], torch.Tensor]
"""Where a box begins in the full tensor, the full tensor's shape, and the box's values."""


class DeclaredShards(ShardedSource):
    """What one rank holds, box by box, by the checkpoint's names.

    Args:
        declared: For each name where the box begins, the full shape, and the local tensor. Read anew in
            each pass.
        tensors: All of the model; by default what is in ``declared``, which then must have the same
            names on all ranks, in the same order.
        rank, ranks: As of `ShardedSource`.

    Raises:
        InvalidInfo: An entry is none of these.
        ManifestMismatch: No tensors; or its full shape is not that of ``tensors``.
    """

    _where = "declared"

    def __init__(
        self,
        declared: Mapping[str, Declared],
        *,
        tensors: Iterable[TensorMeta] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self._declared = declared
        if tensors is None:
            tensors = (
                TensorMeta(name, meta_of(name, local).dtype, shape)
                for name, _, shape, local in self._entries()
            )
        super().__init__(tensors, rank=rank, ranks=ranks)

    @property
    def device(self) -> torch.device:
        return next((local.device for *_, local in self._entries()), torch.device("cpu"))

    def _walk(self) -> Iterator[Piece]:
        for name, start, shape, local in self._entries():
            meta = self._metas.get(name)
            if meta is not None and meta.shape != shape:
                raise self._wrong(
                    f"Tensor {name!r} was declared with another full shape",
                    expected=list(meta.shape),
                    got=list(shape),
                    cure="give the checkpoint's full shape, the same on every rank",
                )
            yield Piece(name, start, local.detach())

    def _look(self) -> Look:
        return Look(((name, start, shape), local) for name, start, shape, local in self._entries())

    def _entries(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        for name, entry in self._declared.items():
            try:
                start, shape, local = entry
                first, full = tuple(map(index, start)), tuple(map(index, shape))
            except (TypeError, ValueError) as error:
                raise InvalidInfo(
                    f"Tensor {name!r} was not declared as a shard",
                    backend=BACKEND,
                    where=self._where,
                    expected="(start, full shape, local tensor)",
                    got=shown(entry),
                    cure="give for example ((0, 0), (32000, 4096), embedding[:16000])",
                ) from error
            require_plain(name, local, where=self._where)
            yield name, first, full, local
