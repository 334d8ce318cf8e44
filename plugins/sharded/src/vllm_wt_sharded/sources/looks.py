"""Whether a source has the same memory as before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_wt.exposed import placed


class Look:
    """Which memory a source had at one time, under which names.

    Holds it, so that none of it can have become another tensor's at the same address.

    Args:
        items: Names, and the plain tensors that the pieces are views of.
    """

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        pairs = list(items)
        self._names = [name for name, _ in pairs]
        # What is no tensor, a walk refuses.
        self._memory = [value.detach() for _, value in pairs if isinstance(value, torch.Tensor)]
        # Kept apart: what is detached follows its tensor when that is resized.
        self._places = placed(self._memory)

    def is_same(self, other: Look) -> bool:
        return self._names == other._names and self._places == other._places
