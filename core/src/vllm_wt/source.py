"""Where the trainer's weights come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of


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
        in place.
        """


class StateDictSource(WeightSource):
    """Weights of a mapping of names to full tensors, read anew at each pass.

    Args:
        state: The mapping; its tensors may change in place or be replaced between rounds.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def manifest(self) -> Manifest:
        return Manifest(tuple(meta_of(name, tensor) for name, tensor in self._state.items()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._state.items():
            yield name, tensor.detach()


class ModuleSource(WeightSource):
    """Parameters of a module, each storage once, as ``module.named_parameters()`` yields them.

    Args:
        module: A plain module whose parameters have the checkpoint's names.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def manifest(self) -> Manifest:
        return Manifest(
            tuple(meta_of(name, param) for name, param in self._module.named_parameters())
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._module.named_parameters():
            yield name, param.detach()


def as_source(source: Any) -> WeightSource:
    """A source for what the caller has: a source, a module or a state dict.

    Raises:
        InvalidInfo: None of these.
    """
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, torch.nn.Module):
        return ModuleSource(source)
    if isinstance(source, Mapping):
        return StateDictSource(source)
    raise InvalidInfo(
        "This cannot be a source of weights",
        where="source",
        expected="a WeightSource, a torch.nn.Module or a mapping of names to tensors",
        got=type(source).__name__,
    )
