"""What one rank of a trainer holds of the checkpoint's tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.exposed import require_memory
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import meta_of
from vllm_wt.source import WeightSource
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.sources.looks import Look


@dataclass(frozen=True)
class Piece:
    """A box of one of the checkpoint's tensors, and where this rank has it.

    Args:
        name: Of the tensor in the checkpoint.
        start: First index of the box in each dimension of the full tensor.
        tensor: The values, of the box's size; detached. A view of the trainer's own memory, which need
            not be contiguous, unless the source made it for this pass.
    """

    name: str
    start: tuple[int, ...]
    tensor: torch.Tensor


class ShardedSource(WeightSource):
    """The weights of one rank of a trainer, under the names that the checkpoint has.

    Each rank has one. A rank says what it holds, and nothing of others: they may hold the same, and
    what no rank holds is found when the ranks' layouts are joined. It has no full tensors to walk, so
    that no other backend can send it.

    Args:
        tensors: All of the model, with their full shapes; the same on every rank.
        rank: Of this process among the trainer's, from 0.
        ranks: How many they are. Both are by default those of ``torch.distributed``, and 0 of 1 where
            that is not in use.

    Raises:
        InvalidInfo: There is no such rank.
        ManifestMismatch: No tensors, or a name that occurs twice.
    """

    _where = "source"
    _last: Look | None = None

    def __init__(
        self, tensors: Iterable[TensorMeta], *, rank: int | None, ranks: int | None
    ) -> None:
        self.tensors = Manifest(tuple(tensors)).tensors
        self.rank, self.ranks = _place(rank, ranks)
        self._metas = {tensor.name: tensor for tensor in self.tensors}

    def manifest(self) -> Manifest:
        return Manifest(self.tensors)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise InvalidInfo(
            "A source of shards has no full tensors",
            where=self._where,
            expected=f"the backend {BACKEND!r}, which sends pieces",
            got="another one, or one that wants them whole",
            cure=f'connect with backend="{BACKEND}", without snapshot; or give the model itself',
        )

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    @abstractmethod
    def _walk(self) -> Iterable[Piece]:
        """The pieces as they are now; those without elements may be left out."""

    def _look(self) -> Look | None:
        """What the pieces go by, in little time; None where it can't be told."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this rank has its pieces."""

    @property
    def made(self) -> frozenset[str]:
        """Names whose pieces are made anew by :meth:`pieces`, and not to be exposed in place: what the
        source casts, reduces or gathers. Nothing else holds them."""
        return frozenset()

    def pieces(self) -> list[Piece]:
        """What this rank holds now, none of it empty.

        To be called between training steps. Where a source says that it reduces or gathers, that is a
        collective, which all ranks walk in the same order; its wait ends with ``gathers_within``
        (`vllm_wt.sources.gathering`), else at the timeout of the process group.

        Raises:
            InvalidInfo: The source has what cannot be sent.
            ManifestMismatch: A piece does not lie in its tensor, has another dtype, is there twice, or
                has lost its memory.
            TransportError, Timeout: A collective has failed.
        """
        self._last = None
        look = None if self.made else self._look()
        found = [piece for piece in self._walk() if piece.tensor.numel()]
        for piece in found:
            self._require_within(piece)
        self._require_distinct(found)
        self._last = look
        return found

    def layout(self) -> Layout:
        """What this rank holds, without values; a pass, as of :meth:`pieces`."""
        rows = ((p.name, self.rank, p.start, tuple(p.tensor.shape)) for p in self.pieces())
        return Layout.of(self.tensors, rows)

    def is_same(self) -> bool:
        """Whether :meth:`pieces` would give the very memory that it gave the last time, under the same
        names; False where that takes as long as to ask it."""
        last = self._last
        look = None if last is None else self._look()
        return last is not None and look is not None and look.is_same(last)

    def _require_within(self, piece: Piece) -> None:
        meta = self._metas.get(piece.name)
        if meta is None:
            raise self._wrong(
                f"The model has no tensor {piece.name!r}",
                expected=f"one of {len(self.tensors)} names, such as {self.tensors[0].name!r}",
                got=piece.name,
                cure="rename or leave out what the checkpoint does not have; see rename=, or the rules",
            )
        got = meta_of(piece.name, piece.tensor)
        if got.dtype != meta.dtype:
            raise self._wrong(
                f"What this rank holds of tensor {piece.name!r} has another dtype",
                expected=meta.dtype,
                got=got.dtype,
                cure="hold it in one dtype on all ranks, as tensors= says; or see dtype=",
            )
        if len(got.shape) != len(meta.shape) or len(piece.start) != len(meta.shape):
            raise self._outside(piece, meta)
        for start, size, whole in zip(piece.start, got.shape, meta.shape, strict=True):
            if start < 0 or start + size > whole:
                raise self._outside(piece, meta)
        require_memory(piece.name, piece.tensor)

    def _require_distinct(self, pieces: list[Piece]) -> None:
        by_name: defaultdict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_name[piece.name].append(piece)
        for name, found in by_name.items():
            for one, other in combinations(found, 2):
                if _overlap(one, other):
                    raise self._wrong(
                        f"This rank says twice that it holds a part of tensor {name!r}",
                        expected="boxes that do not overlap",
                        got=f"{_text(one)} and {_text(other)}",
                        cure="leave one of the two out",
                    )

    def _outside(self, piece: Piece, meta: TensorMeta) -> ManifestMismatch:
        return self._wrong(
            f"What this rank holds does not lie in tensor {piece.name!r}",
            expected=f"a box in shape {list(meta.shape)}",
            got=_text(piece),
            cure="see that it is a part of this tensor, and where it begins; a part that is no DTensor "
            "has to be declared as one, by a ParallelTable or DeclaredShards",
        )

    def _wrong(self, what: str, *, expected: object, got: object, cure: str) -> ManifestMismatch:
        where = f"{self._where} of rank {self.rank}"
        return ManifestMismatch(
            what, backend=BACKEND, where=where, expected=expected, got=got, cure=cure
        )


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if rank is None and ranks is None:
        if not torch.distributed.is_initialized():
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise InvalidInfo(
            "There is no such rank of the trainer",
            backend=BACKEND,
            where="rank, ranks",
            expected="a rank from 0 on, below the number of ranks; or neither of the two",
            got=f"rank={rank}, ranks={ranks}",
            cure="give both, or init torch.distributed first and give none",
        )
    return rank, ranks


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        start < there + size and there < start + length
        for start, length, there, size in zip(
            one.start, one.tensor.shape, other.start, other.tensor.shape, strict=True
        )
    )


def _text(piece: Piece) -> str:
    return f"{list(piece.tensor.shape)} from {list(piece.start)}"
