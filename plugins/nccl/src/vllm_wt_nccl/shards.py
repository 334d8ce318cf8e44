"""What one rank of the trainer sends: its own part of each tensor, which nobody gathers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.manifest import ITEMSIZE, Manifest
from vllm_wt.packing import meta_of
from vllm_wt.source import WeightSource
from vllm_wt.sources.whole import is_dtensor, is_gathered, local_part, whole
from vllm_wt_nccl.cutting import Cuts, Segment
from vllm_wt_nccl.ranges import Range, holders

_WHERE = "senders"


class Shards(WeightSource):
    """Another source's tensors, as far as this rank sends them; each as its elements in a row.

    What is not a run of the full tensor on each rank is gathered in a pass, which all ranks of the
    trainer must make: what to gather they find alike, since it goes by the tensors' form.

    Args:
        source: The weights.
        cuts: Who sends what.
        rank: Of this process among the senders.
        ranks: How ``torch.distributed`` counts each of them.
    """

    def __init__(
        self,
        source: WeightSource,
        cuts: Cuts,
        rank: int,
        ranks: Sequence[int],
    ) -> None:
        self._source = source
        self._cuts = cuts
        self._ranks = ranks
        self._manifest = cuts.own(rank)
        self._dtypes = {tensor.name: tensor.dtype for tensor in self._manifest.tensors}
        own = ((n, s) for n, segments in cuts.of.items() for s in segments if s.sender == rank)
        self._own: dict[str, Segment] = dict(own)
        self._held: dict[Any, bool] = {}
        """Of each form of tensor that was looked at, whether its senders hold what they send."""

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.parts():
            part = self._part(name, tensor)
            if part is not None:
                yield name, part
            del part  # or it would be there while the next one is made

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtensors = dict(self._source.distributed())
        held = {name for name, tensor in dtensors.items() if self._is_held(name, tensor)}
        if self._source.made - held:
            return  # a pass makes some, and all ranks have to be in it
        full = dict(self._source.at_hand())
        for name in self._own:
            tensor = dtensors[name] if name in held else full.get(name)
            # Else it is cast, or put in order, on its way.
            if tensor is not None and self._dtypes[name] == meta_of(name, tensor).dtype:
                part = self._part(name, tensor)
                if part is not None and _is_view(part, tensor):
                    yield name, part

    def is_same(self) -> bool:
        return self._source.is_same()

    @property
    def device(self) -> torch.device:
        return self._source.device

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        own = self._own.get(name)
        spread = is_gathered(tensor)
        if spread and self._is_held(name, tensor):
            return None if own is None else self._local(name, own, tensor)
        if own is None and not (spread and _is_here(tensor)):
            return None
        # Where it is spread, with the ranks that wait for this one, whoever sends it.
        full = whole(name, tensor, where=_WHERE)
        return None if own is None else _in_a_row(full)[slice(*self._range(name, own))]

    def _local(self, name: str, own: Segment, tensor: torch.Tensor) -> torch.Tensor:
        part = _in_a_row(local_part(tensor))
        start, end = self._range(name, own)
        if part.numel() != end - start:
            raise ManifestMismatch(
                f"This rank does not hold of tensor {name!r} what its placement says",
                where=_WHERE,
                expected=f"{end - start} elements",
                got=f"{part.numel()} elements",
                cure="give from_local what torch.chunk makes, or use distribute_tensor",
            )
        return part

    def _is_held(self, name: str, dtensor: Any) -> bool:
        """Whether each sender holds its segment of a tensor; the same on all ranks."""
        segments = self._cuts.of[name]
        form = (segments, tuple(dtensor.shape), dtensor.device_mesh, tuple(dtensor.placements))
        key = (self._dtypes[name], form)
        if key not in self._held:
            held: Mapping[Range, Sequence[int]] = holders(dtensor) or {}
            self._held[key] = all(
                self._ranks[each.sender] in held.get(self._range(name, each), ())
                for each in segments
            )
        return self._held[key]

    def _range(self, name: str, segment: Segment) -> Range:
        itemsize = ITEMSIZE[self._dtypes[name]]
        start = segment.offset // itemsize
        return start, start + segment.nbytes // itemsize


def _is_here(dtensor: Any) -> bool:
    """Whether this rank is one of those that gather it."""
    return dtensor.device_mesh.get_coordinate() is not None


def _is_view(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    local = local_part(tensor) if is_dtensor(tensor) else tensor
    return part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order: a view, where it is contiguous."""
    return tensor.detach().reshape(-1)
