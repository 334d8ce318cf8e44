"""Which rank holds, or needs, which box of which tensor: what both sides tell the planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import ITEMSIZE, TensorMeta
from vllm_wt_sharded import layout_wire
from vllm_wt_sharded.covering import first_orphan
from vllm_wt_sharded.signatures import Signatures

BACKEND = "sharded"
MAX_RANKS = 1 << 20
"""Ranks are below it: tables are made with a place for each."""
MAX_TENSOR_NBYTES = 1 << 48
"""Sums of bytes are int64."""
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Layout:
    """Which box of which tensor is where. Columns, since there are millions of rows.

    A scalar's row uses no dimension. A tensor of 0 elements has no rows. The arrays are read-only.

    Args:
        tensors: All of the checkpoint's tensors, with their full shapes.
        tensor: (n,) int32, index into ``tensors``.
        rank: (n,) int32, who holds the box (a source), or needs it (a destination).
        start: (n, dims) int64, first index in each dimension; ``dims`` is the most dimensions of any
            tensor, at least 1, and a tensor of fewer has start 0 and size 1 in the others.
        size: (n, dims) int64, at least 1 each.

    Raises:
        InvalidInfo: A column has a wrong length, or a box leaves its tensor.
    """

    tensors: tuple[TensorMeta, ...]
    tensor: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for meta in self.tensors:
            if meta.nbytes > MAX_TENSOR_NBYTES:
                raise _invalid(
                    f"The tensor {meta.name!r} is too large",
                    where=meta.name,
                    expected=f"at most {MAX_TENSOR_NBYTES} bytes",
                    got=meta.nbytes,
                )
        dims, rows = self.shapes.shape[1], len(self.tensor)
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
            "tensor": (np.int32, (rows,)),
            "rank": (np.int32, (rows,)),
            "start": (np.int64, (rows, dims)),
            "size": (np.int64, (rows, dims)),
        }
        for name, (dtype, shape) in wanted.items():
            column = np.asarray(getattr(self, name))
            if column.dtype != dtype or column.shape != shape:
                raise _invalid(
                    f"The column {name!r} of a layout has a wrong form",
                    where=name,
                    expected=f"{np.dtype(dtype).name} of shape {shape}",
                    got=f"{column.dtype} of shape {column.shape}",
                )
            column = np.ascontiguousarray(column).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        self._check_ranges()

    def _check_ranges(self) -> None:
        for begin in range(0, len(self), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            tensor, rank = self.tensor[part], self.rank[part]
            start, size = self.start[part], self.size[part]
            for name, column, end in (
                ("tensor", tensor, len(self.tensors)),
                ("rank", rank, MAX_RANKS),
            ):
                if (bad := np.flatnonzero((column < 0) | (column >= end))).size:
                    row = int(bad[0])
                    raise _invalid(
                        f"A layout's {name} is out of range",
                        where=f"{name}[{begin + row}]",
                        expected=f"0 to {end - 1}",
                        got=int(column[row]),
                    )
            # Compared without a sum, which could overflow.
            shape = self.shapes[tensor]
            wrong = (start < 0) | (size < 1) | (size > shape) | (start > shape - size)
            if (bad := np.flatnonzero(wrong.any(axis=1))).size:
                row = int(bad[0])
                meta = self.tensors[tensor[row]]
                raise _invalid(
                    f"A box leaves the tensor {meta.name!r}",
                    where=f"start[{begin + row}], size[{begin + row}]",
                    expected=f"at least 1 element in each dimension, within {list(meta.shape)}",
                    got=f"start {start[row].tolist()}, size {size[row].tolist()}",
                )

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorMeta],
        rows: Iterable[tuple[str, int, Sequence[int], Sequence[int]]],
    ) -> Layout:
        """A layout from ``(name, rank, start, size)``, the last two as long as the tensor's shape.

        Raises:
            InvalidInfo: A name is unknown, or a box has not its tensor's dimensions, or leaves it.
        """
        tensors = tuple(tensors)
        index = {meta.name: i for i, meta in enumerate(tensors)}
        dims = _dims(tensors)
        tensor, rank, start, size = [], [], [], []
        for name, holder, first, sizes in rows:
            if name not in index:
                raise _invalid(
                    f"A layout has a row of a tensor {name!r} that is not in its manifest",
                    where=name,
                    expected="a name of the manifest",
                    got=name,
                )
            own = len(tensors[index[name]].shape)
            if len(first) != own or len(sizes) != own:
                raise _invalid(
                    f"A box of the tensor {name!r} has not its dimensions",
                    where=name,
                    expected=f"start and size of length {own}",
                    got=f"lengths {len(first)} and {len(sizes)}",
                )
            if not 0 <= holder < MAX_RANKS:
                raise _invalid(
                    f"A box of the tensor {name!r} has an impossible rank",
                    where=name,
                    expected=f"0 to {MAX_RANKS - 1}",
                    got=holder,
                )
            tensor.append(index[name])
            rank.append(holder)
            start.append([*first, *([0] * (dims - own))])
            size.append([*sizes, *([1] * (dims - own))])
        return cls(
            tensors,
            np.array(tensor, dtype=np.int32),
            np.array(rank, dtype=np.int32),
            np.array(start, dtype=np.int64).reshape(-1, dims),
            np.array(size, dtype=np.int64).reshape(-1, dims),
        )

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """All rows of several layouts of the same tensors, in their order.

        Raises:
            InvalidInfo: There is none.
            ManifestMismatch: Their tensors differ.
        """
        if not layouts:
            raise _invalid(
                "No layouts to join", where="layouts", expected="at least one", got="none"
            )
        for number, other in enumerate(layouts):
            require_same_tensors(layouts[0], other, where=f"layout {number}")
        return cls(
            layouts[0].tensors,
            np.concatenate([each.tensor for each in layouts]),
            np.concatenate([each.rank for each in layouts]),
            np.concatenate([each.start for each in layouts]),
            np.concatenate([each.size for each in layouts]),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        """(tensors, dims) int64, the full shapes, 1 where a tensor has no such dimension."""
        shapes = np.ones((len(self.tensors), _dims(self.tensors)), dtype=np.int64)
        for i, meta in enumerate(self.tensors):
            shapes[i, : len(meta.shape)] = meta.shape
        return shapes

    @cached_property
    def ranks(self) -> int:
        """One more than the highest rank."""
        return int(self.rank.max(initial=-1)) + 1

    @cached_property
    def itemsizes(self) -> npt.NDArray[np.int64]:
        """(tensors,) int64, bytes an element."""
        return np.array([ITEMSIZE[meta.dtype] for meta in self.tensors], dtype=np.int64)

    @cached_property
    def signatures(self) -> Signatures:
        """The rows grouped by tensor and box, and the tensors by how they are cut."""
        return Signatures.of(self.shapes, *self.columns())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the tensors and all columns, rows in their order, as hex."""
        metas = [[meta.name, meta.dtype, list(meta.shape)] for meta in self.tensors]
        digest = hashlib.sha256(json.dumps(metas, separators=(",", ":")).encode())
        digest.update(b"\n%d\n" % len(self))
        for column, dtype in zip(self.columns(), layout_wire.DTYPES.values(), strict=True):
            digest.update(np.ascontiguousarray(column, dtype=dtype).data)
        return digest.hexdigest()

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """``tensor``, ``rank``, ``start`` and ``size``."""
        return self.tensor, self.rank, self.start, self.size

    def rows_of(self, rank: int) -> npt.NDArray[np.int64]:
        """The rows of one rank, ascending."""
        return np.flatnonzero(self.rank == rank)

    def require_covering(self) -> None:
        """Check that every element of every tensor has an owner; several may have it.

        Raises:
            ManifestMismatch: Names the first tensor with an element that nobody holds, and where.
        """
        orphan = first_orphan(self.shapes, self.signatures)
        if orphan is not None:
            tensor, start, size = orphan
            raise ManifestMismatch(
                f"Nobody holds a part of the tensor {self.tensors[tensor].name!r}",
                backend=BACKEND,
                where=self.box_text(tensor, start, size),
                expected="an owner of every element",
                got="none",
                cure="have every rank of the trainer announce all that it holds, and check the "
                "mesh and the placements",
            )

    def box_text(
        self, tensor: int, start: npt.NDArray[np.int64], size: npt.NDArray[np.int64]
    ) -> str:
        """A box as people write it: ``name[0:4, 2:3]``."""
        meta = self.tensors[tensor]
        own = len(meta.shape)
        ranges = ", ".join(
            f"{s}:{s + z}" for s, z in zip(start[:own].tolist(), size[:own].tolist(), strict=True)
        )
        return f"{meta.name}[{ranges}]"

    def to_wire(self) -> dict[str, Any]:
        """The layout as JSON-safe data; :meth:`from_wire` is its inverse."""
        return layout_wire.encoded(self.tensors, self.columns())

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Layout:
        """Decode a peer's layout.

        Raises:
            InvalidInfo: Names the field that is not what :meth:`to_wire` gives.
            ManifestMismatch: A tensor of the manifest is impossible, or occurs twice.
        """
        tensors, dims, blobs = layout_wire.opened(fields)
        if dims != _dims(tensors):
            raise _invalid(
                "The field 'dims' of a layout disagrees with its tensors",
                where="dims",
                expected=_dims(tensors),
                got=dims,
            )
        tensor, rank, start, size = blobs
        return cls(tensors, tensor, rank, start, size)


def require_same_tensors(one: Layout, other: Layout, *, where: str) -> None:
    """Raise :class:`ManifestMismatch` at the first tensor in which two layouts differ."""
    if one.tensors is other.tensors or one.tensors == other.tensors:
        return
    pairs = zip(one.tensors, other.tensors, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    raise ManifestMismatch(
        "Two layouts are of different tensors",
        backend=BACKEND,
        where=where,
        expected=first[0] if first else f"{len(one.tensors)} tensors",
        got=first[1] if first else f"{len(other.tensors)} tensors",
        cure="give every rank the same manifest, in the same order",
    )


def _dims(tensors: Sequence[TensorMeta]) -> int:
    return max((len(meta.shape) for meta in tensors), default=1) or 1


def _invalid(what: str, *, where: str, expected: object, got: object) -> InvalidInfo:
    return InvalidInfo(
        what,
        backend=BACKEND,
        where=where,
        expected=expected,
        got=got,
        cure="announce boxes of the checkpoint's own tensors; both sides must run the same release",
    )
