"""vLLM 0.33's own ``WeightSource``, as one rank has it, by its shape: vllm is not imported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import BACKEND
from vllm_wt_sharded.sources.base import Piece, ShardedSource
from vllm_wt_sharded.sources.meshes import Runs, divided, pieces_of
from vllm_wt_sharded.sources.plain import require_plain


class VllmShards(ShardedSource):
    """A source that was written for vLLM's ``nccl_m2n``: its ``metadata`` says which ranks own a
    tensor, on which mesh and in which placements; ``iter_local`` yields this rank's part of its own.

    Its metadata is asked for once. All that it yields counts as made anew, since a source may gather or
    export there. Other releases' sources say nothing of shards.

    Args:
        source: The object.
        rank, ranks: As of `ShardedSource`: what vLLM's ``TrainerInitInfo.rank`` is.

    Raises:
        InvalidInfo: It is no such source, or yields what is no tensor.
        ManifestMismatch: What it yields differs from its metadata.
    """

    _where = "vLLM's WeightSource"

    def __init__(self, source: Any, *, rank: int | None = None, ranks: int | None = None) -> None:
        _require_local(source, self._where)
        self._source = source
        entries = list(source.metadata)
        super().__init__((_meta(entry) for entry in entries), rank=rank, ranks=ranks)
        self._own = {
            entry.name: self._dims(entry)
            for entry in entries
            if entry.owners is None or self.rank in entry.owners
        }

    @property
    def device(self) -> torch.device:
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")

    @property
    def made(self) -> frozenset[str]:
        """All that this rank owns."""
        return frozenset(self._own)

    def _walk(self) -> Iterator[Piece]:
        expected = iter(self._own)
        for name, value in self._source.iter_local():
            self._require_next(next(expected, None), name)
            require_plain(name, value, where=self._where)
            yield from pieces_of(name, value.detach(), self._own[name], where=self._where)
        self._require_next(next(expected, None), None)

    def _dims(self, entry: Any) -> list[Runs]:
        if entry.owners is None or entry.placements is None:
            return [[(0, size)] for size in entry.shape]
        coordinate = []
        index = entry.owners.index(self.rank)
        for count in reversed(entry.mesh_shape):
            index, place = divmod(index, count)
            coordinate.append(place)
        return divided(entry.shape, entry.mesh_shape, entry.placements, coordinate[::-1])

    def _require_next(self, expected: str | None, got: str | None) -> None:
        if expected != got:
            raise self._wrong(
                "What the source yields differs from its metadata",
                expected=expected or "no more tensors",
                got=got or "no more tensors",
                cure="yield exactly what this rank owns, in the order of metadata",
            )


def _meta(entry: Any) -> TensorMeta:
    return TensorMeta(entry.name, str(entry.dtype).removeprefix("torch."), tuple(entry.shape))


def _require_local(source: Any, where: str) -> None:
    """Looks without asking, since the metadata may be a collective."""
    known = ("metadata", "iter_local")
    has = [each for each in known if inspect.getattr_static(source, each, None) is not None]
    implements = getattr(source, "implements_iter_local", None)
    if has == list(known) and (implements is None or implements()):
        return
    raise InvalidInfo(
        "This source does not yield what each rank holds",
        backend=BACKEND,
        where=where,
        expected="vLLM 0.33's metadata with owners and placements, and iter_local()",
        got=f"{type(source).__name__} with {' and '.join(has) or 'neither'}",
        cure="give the module itself, or a table of what each rank holds; what yields full tensors "
        "only needs another backend",
    )
