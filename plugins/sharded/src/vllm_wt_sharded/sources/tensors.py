"""Shards of torch's own kinds: FSDP2's, tensor parallelism's and other DTensors; of a module or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from vllm_wt.manifest import TensorMeta
from vllm_wt.source import Cast, ModuleSource, StateDictSource, WeightSource, as_source
from vllm_wt.sources.whole import is_dtensor, local_part, whole
from vllm_wt_sharded.sources.base import Piece, ShardedSource
from vllm_wt_sharded.sources.looks import Look
from vllm_wt_sharded.sources.meshes import divided, pieces_of

Rename = Mapping[str, str | None] | Callable[[str], str | None]


class TensorShards(ShardedSource):
    """A module, a state dict or a list of pairs, plain or with DTensors, as one rank has it.

    A DTensor is exposed as the boxes that its local tensor holds, where it is: uneven ones, those of
    FSDP2 over tensor parallelism, and replicas, which every rank of the mesh declares. One with partial
    values is gathered by each pass first, which is a collective, and is whole on all ranks of its mesh
    then. A rank that is not in a DTensor's mesh holds nothing of it.

    **A plain tensor is whole on this rank**, so those that are on several ranks must have the same
    values. A rank that has only a part of one as a plain tensor has to say so, by a `ParallelTable` or
    `DeclaredShards`; with ``tensors`` given, one that was not is refused for its shape.

    FSDP2 leaves parameters gathered after a forward. A pass, and `is_same`, put its modules back into
    shards first (``FSDPModule.reshard``), as ``state_dict`` does.

    Args:
        weights: What `vllm_wt.source.as_source` takes, and is walked anew in each pass.
        rename: The checkpoint's name for one of the trainer's, None to leave it out; a function, or a
            mapping, where names that are not in it stay as they are.
        dtype: That floating-point tensors are cast to in each pass, shard by shard; by default none is.
        buffers: Of a module: its persistent buffers too.
        tensors: All of the model; by default what is in ``weights``, which then must be alike on all
            ranks. `vllm_wt.sources.checkpoint.manifest_of(folder).tensors` has those of a checkpoint.
        rank, ranks: As of `ShardedSource`.

    Raises:
        InvalidInfo: This is no source, or has what cannot be sent.
        ManifestMismatch: No tensors, or two of the same name.
    """

    _where = "tensors"

    def __init__(
        self,
        weights: Any,
        *,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        tensors: Iterable[TensorMeta] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self._rename = rename
        is_module = isinstance(weights, torch.nn.Module)
        given = ModuleSource(weights, buffers=buffers) if is_module else as_source(weights)
        self._source = given if dtype is None else Cast(given, dtype)
        self._held = _uncast(given)
        self._goes_by, self._buffers = _made_of(self._held)
        self._module = self._goes_by if isinstance(self._goes_by, torch.nn.Module) else None
        self._reshard()
        if tensors is None:
            tensors = (
                TensorMeta(name, meta.dtype, meta.shape)
                for meta in self._source.manifest().tensors
                if (name := self._renamed(meta.name)) is not None
            )
        super().__init__(tensors, rank=rank, ranks=ranks)
        self._made = frozenset(self._made_anew())

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def made(self) -> frozenset[str]:
        """Names of what is cast or has partial values, as it was when this was made."""
        return self._made

    def _walk(self) -> Iterator[Piece]:
        self._reshard()
        for name, tensor in self._source.parts():
            new = self._renamed(name)
            if new is not None:
                yield from self._cut(new, tensor)

    def _cut(self, name: str, tensor: torch.Tensor) -> Iterable[Piece]:
        if not is_dtensor(tensor):
            return [Piece(name, (0,) * tensor.dim(), tensor)]
        dtensor: Any = tensor
        coordinate = dtensor.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        if _is_partial(dtensor):
            return [Piece(name, (0,) * dtensor.dim(), whole(name, dtensor, where=self._where))]
        mesh_shape = dtensor.device_mesh.shape
        dims = divided(dtensor.shape, mesh_shape, dtensor.placements, coordinate)
        return pieces_of(name, local_part(dtensor), dims, where=self._where)

    def _look(self) -> Look | None:
        self._reshard()
        if self._module is not None:
            items: Iterable[tuple[str, torch.Tensor]] = self._module.named_parameters()
            if self._buffers:
                items = [*items, *self._module.named_buffers()]
        elif isinstance(self._goes_by, Mapping):
            items = self._goes_by.items()
        else:
            return None
        with torch.no_grad():  # where to_local is an access
            return Look((n, t.to_local() if is_dtensor(t) else t) for n, t in items)  # type: ignore[attr-defined]

    def _renamed(self, name: str) -> str | None:
        if self._rename is None:
            return name
        return self._rename(name) if callable(self._rename) else self._rename.get(name, name)

    def _made_anew(self) -> Iterator[str]:
        held = {meta.name: meta.dtype for meta in self._held.manifest().tensors}
        dtensors = dict(self._held.distributed())
        # What FSDP2 had gathered counts as made in a module, but is in shards again.
        elsewhere = frozenset() if self._module is not None else self._held.made - {*dtensors}
        for meta in self._source.manifest().tensors:
            dtensor = dtensors.get(meta.name)
            has = held[meta.name] if dtensor is None else str(dtensor.dtype).removeprefix("torch.")
            is_partial = dtensor is not None and _is_partial(dtensor)
            new = self._renamed(meta.name)
            if new is not None and (has != meta.dtype or is_partial or meta.name in elsewhere):
                yield new

    def _reshard(self) -> None:
        fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        if fsdp2 is not None and self._module is not None:
            for module in self._module.modules():
                if isinstance(module, fsdp2):
                    module.reshard()


def _uncast(source: WeightSource) -> WeightSource:
    while type(source) is Cast:
        source = source._source
    return source


def _made_of(source: WeightSource) -> tuple[Any, bool]:
    """What one of core's own sources goes by, a module or a mapping, and whether it has a module's
    buffers; `WeightSync.connect` makes such of what it is given."""
    if type(source) is ModuleSource:
        return source._module, source._buffers
    return (source._state if type(source) is StateDictSource else None), False


def _is_partial(dtensor: Any) -> bool:
    return any(placement.is_partial() for placement in dtensor.placements)
