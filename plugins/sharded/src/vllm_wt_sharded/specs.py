"""How a trainer holds a model, in a few words such as ``pp:2+fsdp:4``; or by files of its own."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import BACKEND, Layout

_MOST_RANKS = 4096
_ALLOWED = (
    "fsdp:N, hsdp:RxN, pp:N or ep:N, or several of them joined by +, each once; or files, *.json"
)
_WORD = re.compile(r"(fsdp|pp|ep):([1-9]\d{0,5})|(hsdp):([1-9]\d{0,5})x([1-9]\d{0,5})")
_LAYER = re.compile(r"(?:^|\.)(\d{1,9})(?:\.|$)")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
_BEFORE_LAYERS = re.compile(r"embed|(?:^|\.)w[tp]e\.")
"""Of the tensors that are of no layer, those that the first stage of a pipeline has."""


def layout_of_spec(spec: str, tensors: Sequence[TensorMeta]) -> Layout:
    """What the ranks of a trainer hold.

    ``fsdp:N`` is the rows of each tensor in N shards, cut as FSDP2 does: the last ones may be smaller,
    or empty. ``hsdp:RxN`` is that R times. ``pp:N`` is the layers in N stages, in their order; the
    first one has the embeddings too, and the last one what else is of no layer. ``ep:N`` is the experts
    in N groups, in their order, and of everything else N shards as of ``fsdp:N``. In ``pp:2+fsdp:4``
    each word divides what the one before it leaves to a rank, and ranks 0 to 3 are the first stage. A
    scalar is on every rank of its stage.

    Args:
        spec: Such words; or a path that ends in ``.json`` and may have ``*`` and ``?``: files of
            `Layout.to_wire`, each of one rank or several.
        tensors: Of the checkpoint; not used for files, which name the trainer's own.

    Raises:
        InvalidInfo: This is no such text or file, or the model cannot be held so.
        ManifestMismatch: Files of different tensors.
    """
    return _of_files(spec) if spec.endswith(".json") else _of_words(spec, tensors)


@dataclass(frozen=True)
class _Held:
    """What one rank has: some rows of each tensor, and of the other dimensions all.

    Args:
        first: (tensors,), the first row.
        rows: (tensors,), how many; 0 of what it has nothing of.
    """

    first: Ints
    rows: Ints


class _Model:
    """What the tensors are, by their names and shapes."""

    def __init__(self, tensors: Sequence[TensorMeta]) -> None:
        self.nobody = Layout.of(tensors, ())
        self.shapes = self.nobody.shapes
        self.is_scalar = np.array([not meta.shape for meta in tensors], dtype=bool)
        self._names = [meta.name for meta in tensors]

    @property
    def everything(self) -> _Held:
        rows = np.where(self.shapes.all(axis=1), self.shapes[:, 0], 0)
        return _Held(np.zeros_like(rows), rows)

    @cached_property
    def layers(self) -> tuple[Ints, int]:
        """(tensors,), the place of each one's layer, and how many layers there are."""
        found = [_LAYER.search(name) for name in self._names]
        numbers = sorted({int(each[1]) for each in found if each})
        place = {number: i for i, number in enumerate(numbers)}
        last = max(0, len(numbers) - 1)
        places = [
            place[int(each[1])] if each else 0 if _BEFORE_LAYERS.search(name) else last
            for name, each in zip(self._names, found, strict=True)
        ]
        return np.array(places, dtype=np.int64), len(numbers)

    @cached_property
    def experts(self) -> tuple[Ints, int]:
        """(tensors,), the expert of each, or -1, and how many experts there are. One tensor may have
        all of a layer's experts, by its rows."""
        found = [_EXPERT.search(name) for name in self._names]
        numbers = np.array([int(each[1]) if each else -1 for each in found], dtype=np.int64)
        together = [".experts." in name for name in self._names]
        rows = self.shapes[together, 0] if (numbers < 0).all() else numbers + 1
        return numbers, int(rows.max(initial=0))


_Division = Callable[[_Model, _Held, int, int], _Held]
"""What one of so many ranks keeps of what they would have together: model, that, count, index."""


def _sharded(model: _Model, held: _Held, count: int, index: int) -> _Held:
    each = np.where(model.is_scalar, 0, -(-held.rows // count))
    begin = np.minimum(index * each, held.rows)
    rows = np.minimum(begin + each, held.rows) - begin
    return _Held(held.first + begin, np.where(model.is_scalar, held.rows, rows))


def _replicated(model: _Model, held: _Held, count: int, index: int) -> _Held:
    return held


def _by_layers(model: _Model, held: _Held, count: int, index: int) -> _Held:
    layer, layers = model.layers
    _require_enough("layers", layers, "stages", count)
    return _Held(held.first, np.where(layer * count // layers == index, held.rows, 0))


def _by_experts(model: _Model, held: _Held, count: int, index: int) -> _Held:
    expert, experts = model.experts
    _require_enough("experts", experts, "groups", count)
    rest = _sharded(model, held, count, index)
    own = np.where(expert * count // experts == index, held.rows, 0)
    return _Held(np.where(expert < 0, rest.first, held.first), np.where(expert < 0, rest.rows, own))


_DIVISIONS: dict[str, _Division] = {"fsdp": _sharded, "pp": _by_layers, "ep": _by_experts}


def _of_words(spec: str, tensors: Sequence[TensorMeta]) -> Layout:
    divisions = _divisions(spec)
    model = _Model(tensors)
    ranks = []
    for coordinate in np.ndindex(*(count for _, count in divisions)):
        held = model.everything
        for (division, count), index in zip(divisions, coordinate, strict=True):
            held = division(model, held, count, index)
        ranks.append(held)
    own = [np.flatnonzero(held.rows) for held in ranks]
    _require_all_hold([len(each) for each in own])
    tensor = np.concatenate(own).astype(np.int32)
    rank = np.repeat(np.arange(len(ranks), dtype=np.int32), [len(each) for each in own])
    start, size = np.zeros_like(model.shapes[tensor]), model.shapes[tensor]
    start[:, 0] = np.concatenate([held.first[each] for held, each in zip(ranks, own, strict=True)])
    size[:, 0] = np.concatenate([held.rows[each] for held, each in zip(ranks, own, strict=True)])
    return Layout(model.nobody.tensors, tensor, rank, start, size)


def _divisions(spec: str) -> list[tuple[_Division, int]]:
    """How the model is divided, step by step, and among how many.

    Raises:
        InvalidInfo: Not all of these words are known, or they mean too many ranks.
    """
    found: list[tuple[_Division, int]] = []
    known: set[str] = set()
    for word in spec.split("+"):
        match = _WORD.fullmatch(word)
        kind = match and (match[1] or match[3])
        if not match or not kind or kind in known:
            raise _invalid(
                "This is no way for a trainer to hold a model",
                expected=_ALLOWED,
                got=f"{kind!r} twice" if kind else repr(word),
                cure="write for example fsdp:8, hsdp:2x4 or pp:2+fsdp:4; for any other way have the "
                "trainer write its layout, as the README of vllm-wt-sharded says",
            )
        known.add(kind)
        if kind == "hsdp":
            found += [(_replicated, int(match[4])), (_sharded, int(match[5]))]
        else:
            found.append((_DIVISIONS[kind], int(match[2])))
    ranks = math.prod(count for _, count in found)
    if ranks > _MOST_RANKS:
        raise _invalid(
            "The trainer has too many ranks",
            expected=f"at most {_MOST_RANKS}",
            got=ranks,
            cure="choose fewer: all replicas, stages and shards are multiplied",
        )
    return found


def _of_files(spec: str) -> Layout:
    paths = sorted(glob.glob(spec))
    if not paths:
        raise _invalid(
            "There is no file of a layout",
            expected="a path that exists, or a pattern such as layout-*.json",
            got=spec,
            cure="write one from each rank of the trainer, as the README of vllm-wt-sharded says",
        )
    layout = Layout.joined([_of_file(Path(path)) for path in paths])
    _require_all_hold(np.bincount(layout.rank).tolist())
    return layout


def _of_file(path: Path) -> Layout:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(
            f"The file {path.name!r} of a layout cannot be read",
            expected="JSON, of Layout.to_wire()",
            got=error,
            cure="write it anew, as the README of vllm-wt-sharded says",
        ) from error
    return Layout.from_wire(fields)


def _require_all_hold(pieces: Sequence[int]) -> None:
    """Raise :class:`InvalidInfo` where a rank holds nothing, of these numbers of pieces by rank."""
    idle = [rank for rank, count in enumerate(pieces) if not count]
    if idle or not pieces:
        raise _invalid(
            "A rank of the trainer would hold nothing",
            expected="a part of a tensor on each rank",
            got=f"none on rank {idle[0]} of {len(pieces)}" if idle else "no ranks",
            cure="choose fewer ranks; one that holds nothing does not belong to the trainer's group",
        )


def _require_enough(what: str, there: int, parts: str, wanted: int) -> None:
    if there < wanted:
        raise _invalid(
            f"The model cannot be divided into {wanted} {parts}",
            expected=f"at least as many {what} as {parts}",
            got=f"{there} {what}, by the names of its tensors",
            cure=f"choose at most {there} {parts}" if there else "leave this word out",
        )


def _invalid(what: str, *, expected: object, got: object, cure: str) -> InvalidInfo:
    return InvalidInfo(what, backend=BACKEND, where="source", expected=expected, got=got, cure=cure)
