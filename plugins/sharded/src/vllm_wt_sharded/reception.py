"""What one worker takes from each rank of the trainer: planned once, at connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_wt.digests import BLOCK, blocks
from vllm_wt.errors import CorruptTransfer
from vllm_wt.info import PullInitInfo
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.loading.staging import Intake
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import Layout as Places
from vllm_wt.pull.exposure import Exposure
from vllm_wt_sharded.exposing import piece_metas
from vllm_wt_sharded.info import ShardedInitInfo
from vllm_wt_sharded.layout import BACKEND, Layout
from vllm_wt_sharded.needs import needs_of
from vllm_wt_sharded.plan import Rows
from vllm_wt_sharded.planner import plan as planned
from vllm_wt_sharded.sourcing import Taken, sourced


@dataclass(frozen=True)
class FromRank:
    """What is taken from one rank.

    Args:
        rank: Of the trainer.
        exposure: Its buffers.
        slices: What is read of its pieces.
    """

    rank: int
    exposure: Exposure
    slices: Slices

    @property
    def nbytes(self) -> int:
        """Bytes of memory to receive it into, in whole blocks."""
        return blocks(Places(self.slices.plan.manifest, alignment=BLOCK).nbytes) * BLOCK

    @property
    def names(self) -> tuple[str, ...]:
        """Of the pieces, in order."""
        return tuple(tensor.name for tensor in self.slices.plan.manifest.tensors)


@dataclass(frozen=True)
class Received:
    """Where everything of a worker's comes.

    Args:
        parts: Memory for each of `Reception.parts`.
        fulls: The tensors that are put together.
    """

    parts: tuple[torch.Tensor, ...]
    fulls: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reception:
    """All that one worker takes.

    Args:
        parts: From each rank that it takes something from.
        together: Full tensors that are put together here, and what of.
        alone: Full tensors that are one piece, and which.
        fulls: What the tensors of ``together`` are.
        intake: What the engine says of it to core.
    """

    parts: tuple[FromRank, ...]
    together: Mapping[str, tuple[Taken, ...]]
    alone: Mapping[str, str]
    fulls: tuple[TensorMeta, ...]
    intake: Intake

    @cached_property
    def nbytes(self) -> int:
        """Bytes of memory to receive into."""
        return sum(part.nbytes for part in self.parts) + max(1, self._full_nbytes)

    def places(self, arena: torch.Tensor) -> Received:
        """Where everything comes, in memory of that size."""
        parts, at = [], 0
        for part in self.parts:
            parts.append(arena[at : at + part.nbytes])
            at += part.nbytes
        fulls = {}
        if self.fulls:
            fulls = dict(Places(Manifest(self.fulls), alignment=BLOCK).views(arena[at:]))
        return Received(tuple(parts), fulls)

    @property
    def _full_nbytes(self) -> int:
        return Places(Manifest(self.fulls), alignment=BLOCK).nbytes if self.fulls else 0


def layout_of(info: ShardedInitInfo) -> Layout:
    """What the trainer's ranks hold, checked.

    Raises:
        CorruptTransfer, InvalidInfo, ManifestMismatch: It makes no sense.
    """
    layout = Layout.from_wire(info.layout)
    if layout.digest != info.layout_digest:
        raise _mismatch("The layout disagrees with its digest", info.layout_digest, layout.digest)
    if Manifest(layout.tensors).digest != info.manifest_digest:
        raise _mismatch(
            "The layout is of other tensors than the manifest",
            info.manifest_digest,
            Manifest(layout.tensors).digest,
        )
    if layout.ranks != len(info.owners):
        raise _mismatch(
            "Not every rank says where its pieces can be read", layout.ranks, len(info.owners)
        )
    return layout


def reception(
    plan: LoadPlan,
    info: ShardedInitInfo,
    *,
    worker: int,
    gap: int,
    alignment: int,
    most: int,
) -> Reception:
    """Plan what a worker takes, and from whom.

    A worker plans for itself: it takes what several ranks hold from all of them alike, and so do all
    others, so that no rank gives much more than another.

    Args:
        plan: Of the full tensors.
        info: Of the trainer.
        worker: Rank of the worker.
        gap: Bytes that are better read too much than left out by one more read.
        alignment: Bytes that the fabric's offsets are multiples of.
        most: Reads in all.

    Raises:
        CorruptTransfer, InvalidInfo, ManifestMismatch: What the trainer says makes no sense.
    """
    layout = layout_of(info)
    needs = needs_of(plan, worker)
    rows = planned(layout, needs).for_worker(worker) if len(needs) else None
    pieces = _Pieces(layout)
    taken = pieces.taken(rows)
    used = sorted({pieces.rank_of[each.piece] for boxes in taken.values() for each in boxes})
    metas = [meta for rank in used for meta in pieces.of(rank)]
    if not metas:  # all of it is empty, or not for this worker; a manifest is never empty
        first = int(layout.rank[0]) if len(layout) else 0
        metas = sorted(pieces.of(first), key=lambda meta: meta.nbytes)[:1]
    found = sourced(plan, taken, metas)
    fulls = tuple(t for t in plan.manifest.tensors if t.name in found.together)
    if not used and not fulls:
        used = [pieces.rank_of[meta.name] for meta in metas]
    manifests = {rank: Manifest(pieces.of(rank)) for rank in used}
    slices = sliced(found.plan, gap, alignment, most)
    parts = []
    for rank in used:
        exposure = Exposure.of(_as_one(info, rank), manifests[rank])
        parts.append(FromRank(rank, exposure, _of(slices, manifests[rank])))
    together = {n: boxes for n, boxes in found.together.items() if not _is_whole(boxes)}
    alone = {n: boxes[0].piece for n, boxes in found.together.items() if _is_whole(boxes)}
    return Reception(
        tuple(part for part in parts if part.names),
        together,
        alone,
        tuple(tensor for tensor in fulls if tensor.name in together),
        Intake(_for_core(plan, slices, found.together, fulls, is_read=bool(used))),
    )


class _Pieces:
    """The names of pieces, and where they are."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        self._first: dict[int, dict[int, int]] = {}
        self.rank_of: dict[str, int] = {}

    def of(self, rank: int) -> tuple[TensorMeta, ...]:
        """Those of a rank, in order."""
        if rank not in self._metas:
            metas = self._metas[rank] = piece_metas(self._layout, rank)
            self._first[rank] = {
                row: number for number, row in enumerate(self._layout.rows_of(rank).tolist())
            }
            self.rank_of |= dict.fromkeys((meta.name for meta in metas), rank)
        return self._metas[rank]

    def taken(self, rows: Rows | None) -> dict[str, list[Taken]]:
        """What is taken of each tensor."""
        found: dict[str, list[Taken]] = {}
        if rows is None:
            return found
        layout = self._layout
        columns = (rows.source_row, rows.source_rank, rows.tensor, rows.start, rows.size)
        for row, rank, tensor, start, size in zip(*(c.tolist() for c in columns), strict=True):
            meta = layout.tensors[tensor]
            dims = len(meta.shape)
            found.setdefault(meta.name, []).append(
                Taken(
                    self.of(rank)[self._first[rank][row]].name,
                    tuple(layout.start[row, :dims].tolist()),
                    tuple(layout.size[row, :dims].tolist()),
                    tuple(start[:dims]),
                    tuple(size[:dims]),
                    meta.shape,
                )
            )
        return found


def _is_whole(boxes: Sequence[Taken]) -> bool:
    """Whether one piece is all of a tensor."""
    return len(boxes) == 1 and boxes[0].is_all


def _as_one(info: ShardedInitInfo, rank: int) -> PullInitInfo:
    """What a rank would say if it were a trainer by itself."""
    owner = info.owners[rank]
    return PullInitInfo(
        session=info.session,
        tensors=(),
        manifest_digest=info.manifest_digest,
        handle=owner.handle,
        verify=info.verify,
        packed=owner.packed,
        bucket_nbytes=owner.bucket_nbytes,
        slots=owner.slots,
    )


def _of(slices: Slices, manifest: Manifest) -> Slices:
    """What is read of the pieces of one rank."""
    names = {tensor.name for tensor in manifest.tensors}
    tensors = tuple(t for t in slices.plan.manifest.tensors if t.name in names)
    if not tensors:
        return Slices(replace(slices.plan, manifest=manifest, copies=()), {})
    runs = {tensor.name: slices.runs[tensor.name] for tensor in tensors}
    return Slices(replace(slices.plan, manifest=Manifest(tensors), copies=()), runs)


def _for_core(
    plan: LoadPlan,
    slices: Slices,
    together: Mapping[str, Sequence[Taken]],
    fulls: tuple[TensorMeta, ...],
    *,
    is_read: bool,
) -> LoadPlan:
    """The plan of what is handed over: pieces as they are, and full tensors."""
    gone = {each.piece for boxes in together.values() for each in boxes}
    kept = tuple(t for t in slices.plan.manifest.tensors if t.name not in gone and is_read)
    return replace(plan, manifest=Manifest((*kept, *fulls)), copies=slices.plan.copies, unused=())


def _mismatch(what: str, expected: object, got: object) -> CorruptTransfer:
    return CorruptTransfer(
        what,
        backend=BACKEND,
        where="layout",
        expected=expected,
        got=got,
        cure="connect again; both sides must run the same release",
    )
