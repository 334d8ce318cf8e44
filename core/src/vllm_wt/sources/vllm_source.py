"""vLLM's own ``WeightSource``, of any release, by its shape: vllm is not imported.

=========  ========================================  ==========================
vLLM       ``metadata``                              a pass over full tensors
=========  ========================================  ==========================
0.26-0.28  method                                    ``iter(source)``
0.29-0.32  method; ``held_names()``                  ``iter(source)``
0.33       ``functools.cached_property``             ``source.iter_full()``
=========  ========================================  ==========================

Its entries have ``name``, ``dtype`` and ``shape`` in all of them (``ParamMeta``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import meta_of
from vllm_wt.sources.base import WeightSource
from vllm_wt.sources.whole import require_sendable, whole

_WHERE = "vLLM's WeightSource"


def is_vllm_source(source: Any) -> bool:
    """Whether it has the shape; looks without asking, since 0.33's metadata may be a collective."""
    if isinstance(source, type) or inspect.getattr_static(source, "metadata", None) is None:
        return False
    return any(
        inspect.getattr_static(source, name, None) is not None for name in ("iter_full", "__iter__")
    )


class VllmSource(WeightSource):
    """A source that was written for vLLM's trainer engines.

    Its metadata is asked for once, and each tensor of a pass is held against it. All tensors count
    as made anew, since most such sources gather or export.

    Args:
        source: The object.

    Raises:
        InvalidInfo: Its metadata has no names, dtypes and shapes; this rank holds only a part; or
            it yields what is no tensor.
        ManifestMismatch: A pass differs from the metadata.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self._manifest.tensors
        full = getattr(self._source, "iter_full", None)
        count = 0
        for name, value in full() if full is not None else iter(self._source):
            require_sendable(name, value, where=_WHERE)
            tensor = whole(name, value, where=_WHERE)
            got = meta_of(name, tensor)
            expected = tensors[count] if count < len(tensors) else None
            if got != expected:
                raise _disagrees(count, _text(expected), _text(got))
            count += 1
            yield name, tensor
        if count < len(tensors):
            raise _disagrees(count, _text(tensors[count]), _text(None))

    @property
    def made(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self._manifest.tensors)

    @cached_property
    def _manifest(self) -> Manifest:
        metadata = self._source.metadata
        entries = metadata() if callable(metadata) else metadata
        if not isinstance(entries, Iterable):
            raise InvalidInfo(
                "The metadata is not a list",
                where=_WHERE,
                expected="a list of objects with name, dtype and shape",
                got=type(entries).__name__,
                cure="give a WeightSource as vLLM's base.py defines it, or the module itself",
            )
        manifest = Manifest(tuple(_meta(entry) for entry in entries))
        held_names = getattr(self._source, "held_names", None)
        held = held_names() if callable(held_names) else None
        if held is not None:
            here = set(held)
            missing = [tensor.name for tensor in manifest.tensors if tensor.name not in here]
            if missing:
                raise InvalidInfo(
                    "This rank holds only a part of the model",
                    where=f"held_names() of {_WHERE}",
                    expected=f"all {len(manifest)} names of metadata()",
                    got=f"{len(manifest) - len(missing)} of them, without {missing[0]!r}",
                    cure="give a source that gathers over the pipeline's and experts' ranks",
                )
        return manifest


def _meta(entry: Any) -> TensorMeta:
    try:
        name, dtype, shape = entry.name, entry.dtype, tuple(int(dim) for dim in entry.shape)
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInfo(
            "An entry of the metadata is not one of vLLM's",
            where=_WHERE,
            expected="an object with name, dtype and shape",
            got=repr(entry)[:200],
            cure="give a WeightSource as vLLM's base.py defines it, or the module itself",
        ) from error
    # A torch.dtype in vLLM's own; a source of the user's may as well give its name.
    return TensorMeta(str(name), str(dtype).removeprefix("torch."), shape)


def _text(meta: TensorMeta | None) -> str:
    return "no more tensors" if meta is None else f"{meta.name} {meta.dtype} {list(meta.shape)}"


def _disagrees(index: int, expected: str, got: str) -> ManifestMismatch:
    return ManifestMismatch(
        f"What the source yields differs from its metadata at tensor {index}",
        where=_WHERE,
        expected=expected,
        got=got,
        cure="yield full tensors in the order of metadata, with its dtypes and shapes",
    )
