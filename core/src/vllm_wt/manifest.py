"""What will be sent: names, dtypes and shapes of every tensor, agreed on once, at init.

A round then carries only the manifest's digest, however many tensors there are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from vllm_wt.errors import ManifestMismatch

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""The dtypes that may cross, by torch's name, and bytes an element. A peer's name is looked up here
and nowhere else."""

_MAX_DIM = 2**48


@dataclass(frozen=True)
class TensorMeta:
    """One tensor as the checkpoint names it.

    Args:
        name: Its name in the checkpoint, as vLLM's ``load_weights`` expects it.
        dtype: torch's dtype name without the ``torch.`` prefix.
        shape: Full (unsharded) shape; ``()`` for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ManifestMismatch(
                f"Tensor {self.name!r} has a dtype that cannot be sent",
                expected=f"one of {', '.join(ITEMSIZE)}",
                got=self.dtype,
                cure="cast it to one of these, or leave it out",
            )
        if any(not 0 <= dim <= _MAX_DIM for dim in self.shape):
            raise ManifestMismatch(
                f"Tensor {self.name!r} has an impossible shape",
                expected="sizes between 0 and 2**48",
                got=list(self.shape),
                cure="check the shape of this tensor in the source",
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when contiguous."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The ordered list of tensors of one model.

    Raises:
        ManifestMismatch: No tensors, or a name that occurs twice.
    """

    tensors: tuple[TensorMeta, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ManifestMismatch(
                "The source yields no tensors",
                expected="at least one",
                got=0,
                cure="check that the source wraps the module whose weights are to be sent",
            )
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ManifestMismatch(
                    f"The name {tensor.name!r} occurs twice",
                    expected="distinct names",
                    cure="leave one of the two out, or rename it",
                )
            seen.add(tensor.name)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of a full update."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, dtypes and shapes in order, as hex."""
        rows = [[t.name, t.dtype, list(t.shape)] for t in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def require_same(self, other: Iterable[TensorMeta], *, where: str) -> None:
        """Raise :class:`ManifestMismatch` at the first tensor of ``other`` that differs."""
        theirs = tuple(other)
        if theirs == self.tensors:
            return
        mine = {t.name: t for t in self.tensors}
        names = {t.name for t in theirs}
        unexpected = [t.name for t in theirs if t.name not in mine]
        missing = [t.name for t in self.tensors if t.name not in names]
        if unexpected or missing:
            raise ManifestMismatch(
                "The tensors differ from the manifest agreed on at init",
                where=where,
                expected=f"{len(self)} tensors, missing {_few(missing)}",
                got=f"{len(theirs)} tensors, unexpected {_few(unexpected)}",
                cure="connect again after changing what is sent",
            )
        for ours, theirs_ in zip(self.tensors, theirs, strict=True):
            if ours != theirs_:
                raise ManifestMismatch(
                    "A tensor differs from the manifest agreed on at init",
                    where=where,
                    expected=f"{ours.name} {ours.dtype} {list(ours.shape)}",
                    got=f"{theirs_.name} {theirs_.dtype} {list(theirs_.shape)}",
                    cure="connect again after changing what is sent",
                )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{names[:3]}{more}"
