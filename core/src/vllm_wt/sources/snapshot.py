"""A copy of a source's weights, which stays as it is while the trainer goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.exposed import is_plain, require_as_announced, require_memory
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Copies, Layout
from vllm_wt.sources.base import WeightSource

Place = Literal["device", "host"]
"""Where a snapshot is kept: beside the weights, or in (pinned) memory of the host."""


class Snapshot(WeightSource):
    """The weights of another source as they were when they were taken last.

    Tensors that are gathered are so once, when they are taken; readers read the snapshot where it is.

    Args:
        source: The weights.
        place: Where they are copied to: ``"device"``, of which it takes as much memory as they do, or
            ``"host"``.
    """

    def __init__(self, source: WeightSource, place: Place) -> None:
        self._source = source
        self._manifest = source.manifest()
        self._metas = {tensor.name: tensor for tensor in self._manifest.tensors}
        self._device = source.device if place == "device" else torch.device("cpu")
        self._pinned = place == "host" and source.device.type == "cuda"
        self._views: dict[str, torch.Tensor] = {}
        self._copies: Copies | None = None
        """Of all tensors, which are there in full and were where they are."""

    def take(self) -> None:
        """Copy what the source has now. Where it gathers, all its ranks do this at the same time.

        Raises:
            ManifestMismatch: It has other tensors than before, or one has lost its memory.
            WeightTransferError: As of the source.
        """
        self._allocate()
        if self._copies is None or not self._source.is_same() or not self._copies.in_place:
            self._manifest.require_same(self._source.manifest().tensors, where="snapshot")
            self._copies = self._prepared()
        if self._copies is not None:
            self._copies.run()
        else:
            self._walk()
        if self._source.device.type == "cuda":
            torch.cuda.synchronize(self._source.device)  # readers see memory, not our streams

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._allocate()
        return iter(self._views.items())

    def is_same(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return self._device

    def _allocate(self) -> None:
        if not self._views:
            layout = Layout(self._manifest)
            memory = torch.zeros(
                layout.nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
            self._views = dict(layout.views(memory))

    def _prepared(self) -> Copies | None:
        """The copies of all tensors at once; None where some must be made, or come from elsewhere."""
        made = self._source.made
        there = {}
        for name, tensor in self._source.at_hand():
            if name not in made and is_plain(tensor) and tensor.device == self._device:
                require_as_announced(self._metas, name, tensor)
                require_memory(name, tensor)
                there[name] = tensor
        if len(there) < len(self._metas):
            return None
        return Copies((self._views[name], tensor) for name, tensor in there.items())

    def _walk(self) -> None:
        tensors = iter(self._source)
        missing = set(self._metas)
        try:
            for name, tensor in tensors:
                require_as_announced(self._metas, name, tensor)
                require_memory(name, tensor)
                self._views[name].copy_(tensor.detach(), non_blocking=True)
                missing.discard(name)
                del tensor  # or it would be there while the next one is made
        except BaseException:
            while next(tensors, None) is not None:  # other ranks are in the same gathers
                pass
            raise
        if missing:
            raise ManifestMismatch(
                "The source has not yielded all tensors of its manifest",
                where="snapshot",
                expected=f"{len(self._metas)} tensors",
                got=f"none named {min(missing)!r}",
                cure="let the source's manifest and its tensors agree",
            )
