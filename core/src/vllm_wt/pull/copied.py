"""Tensors that cannot be exposed where they are: copied once a round into memory that can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_wt.exposed import is_plain
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Copies, Layout, meta_of


class Copied:
    """The copies, in one block.

    Args:
        tensors: What is copied; not all of it has to be plain.
        zeros: Makes memory of so many bytes that can be exposed.
        former: The copies of the last round; for tensors of the same form, its block is used again.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        zeros: Callable[[int], torch.Tensor],
        former: Copied | None = None,
    ) -> None:
        self._metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        self.views: dict[str, torch.Tensor] = {}
        if tensors and former is not None and former._metas == self._metas:
            self.views = former.views
        elif tensors:
            layout = Layout(Manifest(self._metas))
            self.views = dict(layout.views(zeros(layout.nbytes)))
        self._copies = Copies((self.views[name], tensor) for name, tensor in tensors.items())
        self._are_plain = all(map(is_plain, tensors.values()))

    @property
    def can_repeat(self) -> bool:
        """Whether :meth:`run` copies what the same tensors hold then."""
        return self._are_plain and self._copies.in_place

    def run(self) -> None:
        """Copy what they hold now."""
        self._copies.run()
