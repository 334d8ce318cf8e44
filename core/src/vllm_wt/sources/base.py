"""What a source of weights is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from vllm_wt.manifest import Manifest


class WeightSource(ABC):
    """The trainer's weights, under the names that the checkpoint has.

    Both channels must agree element for element, and every pass must yield the same order: ranks
    that share a tensor gather it with a collective.
    """

    @abstractmethod
    def manifest(self) -> Manifest:
        """Names, dtypes and full shapes, without moving any data."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass over ``(name, full tensor)`` in manifest order.

        A tensor that exists in full is yielded itself, not a copy: one-sided backends expose it
        in place, unless its name is in :attr:`made`.
        """

    @property
    def made(self) -> frozenset[str]:
        """Names whose tensors are made anew in each pass: gathered, read from a file, cast.

        Nothing but the pass holds such a tensor, so a backend copies it before it asks for the
        next one, and never exposes it in place. A name may come and go between passes.
        """
        return frozenset()
