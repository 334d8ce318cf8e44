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

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are there in full already, in manifest order; makes nothing, and asks no peer.

        One of them may be in :attr:`made` all the same: it is not to be exposed in place. A source
        that cannot tell without making the others has none.
        """
        return iter(()) if self.made else iter(self)

    def distributed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The DTensors among them, as the source holds them, in manifest order; makes nothing, and asks
        no peer. A pass may yield them in another dtype."""
        return iter(())

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass, as of iteration; DTensors are yielded as such, and not gathered."""
        return iter(self)

    def is_same(self) -> bool:
        """Whether :meth:`at_hand` would yield all of the manifest, and the very tensors that it did the
        last time, under the same names; False where that takes as long as to yield them."""
        return False

    @property
    def device(self) -> torch.device:
        """Where to put tensors together that are not there in full yet; best where they are made."""
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")

    @property
    def made(self) -> frozenset[str]:
        """Names whose tensors are made anew in each pass: gathered, read from a file, cast.

        Nothing but the pass holds such a tensor, so a backend copies it before it asks for the
        next one, and never exposes it in place. A name may come and go between passes, where
        :meth:`at_hand` goes on telling what is there.
        """
        return frozenset()
