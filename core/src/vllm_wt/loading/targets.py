"""What a load can write to: the parameters and buffers of a model, found by their memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from vllm_wt.loading.plan import Copy, Fill, full_name
from vllm_wt.loading.regions import extent


def key_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, on the meta device too, while somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


class Target:
    """One parameter or buffer, with all its names, and what was written to it in order."""

    __slots__ = (
        "buffer",
        "copies",
        "dtype",
        "fills",
        "first",
        "key",
        "meta",
        "names",
        "shape",
        "sharing",
        "stop",
        "strides",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        self.names: list[tuple[str, str]] = []
        self.sharing: tuple[Target, ...] = (self,)
        """All that have elements of it, itself among them: different views of one memory."""
        self.buffer = not isinstance(tensor, torch.nn.Parameter)
        self.key = key_of(tensor)
        self.meta = tensor.is_meta
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.strides = tensor.stride()
        self.first = int(tensor.storage_offset())
        self.stop = self.first + extent(self.shape, self.strides)
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []

    @property
    def module(self) -> str:
        return self.names[0][0]

    @property
    def modules(self) -> list[str]:
        """Every module that its elements belong to."""
        return list(dict.fromkeys(module for each in self.sharing for module, _ in each.names))

    @property
    def name(self) -> str:
        return full_name(*self.names[0])


class Targets:
    """All parameters and buffers of a model as they are now.

    Attributes:
        uninitialized: Modules with parameters that have no shape yet, or no strides.
        loaders: Each tensor, which may have a weight loader, and its target.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._by_key: dict[int, list[Target]] = {}
        # Holding the tensors keeps their storages, whose addresses are the keys.
        self._held: list[_Held] = []
        self.uninitialized: list[str] = []
        self.loaders: list[tuple[torch.Tensor, Target]] = []
        for module_name, module in model.named_modules():
            for places, name, tensor in tensors_of(module):
                unknown = isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
                if unknown or tensor.layout is not torch.strided:
                    self.uninitialized.append(module_name)
                    continue
                target = self._add(tensor)
                target.names.append((module_name, name))
                self._held.append(
                    (module_name, name, module, places, tensor, tensor.data, target.key)
                )
                self.loaders.append((tensor, target))
        self._note_sharing()

    def _add(self, tensor: torch.Tensor) -> Target:
        target = Target(tensor)
        same = self._by_key.setdefault(target.key, [])
        for other in same:
            if (target.first, target.shape, target.strides, target.dtype) == (
                other.first,
                other.shape,
                other.strides,
                other.dtype,
            ):
                return other
        same.append(target)
        return target

    def __iter__(self) -> Iterator[Target]:
        return chain.from_iterable(self._by_key.values())

    def has(self, key: int) -> bool:
        """Whether a storage is that of a parameter."""
        return key in self._by_key

    def at(self, key: int) -> list[Target]:
        """The parameters in a storage."""
        return self._by_key.get(key, [])

    def find(self, tensor: torch.Tensor) -> Target | None:
        """The parameter that a tensor is a view of: of several, the smallest that holds it.

        Of equal ones that is a parameter rather than a buffer.
        """
        here = self._by_key.get(key_of(tensor))
        if here is None or len(here) == 1:
            return here[0] if here else None
        first = tensor.storage_offset()
        stop = first + extent(tensor.shape, tensor.stride())
        holding = [t for t in here if t.first <= first and stop <= t.stop]
        return min(holding or here, key=lambda t: (t.stop - t.first, t.buffer))

    def _note_sharing(self) -> None:
        for here in self._by_key.values():
            groups: list[list[Target]] = []
            stop = 0
            for target in sorted(here, key=lambda t: t.first):
                if not groups or target.first >= stop:
                    groups.append([])
                groups[-1].append(target)
                stop = max(stop, target.stop)
            for group in groups:
                for target in group:
                    target.sharing = tuple(group)

    def restore(self) -> Iterator[tuple[str, str]]:
        """Put parameters back that were replaced, or given other memory.

        Yields:
            The names of the module and of each such parameter.
        """
        for module_name, name, module, places, tensor, data, key in self._held:
            changed = places.get(name) is not tensor
            if changed:
                for others in (module._parameters, module._buffers, vars(module)):
                    if others is not places:
                        others.pop(name, None)
                places[name] = tensor
            if key_of(tensor) != key:
                tensor.data = data
                changed = True
            if changed:
                yield module_name, name


_Places = dict[str, Any]
_Held = tuple[str, str, torch.nn.Module, _Places, torch.Tensor, torch.Tensor, int]
"""The module's name, the tensor's there, the module, its dictionary that has it, the tensor, its
memory held, and that memory's key."""


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[_Places, str, torch.Tensor]]:
    """A module's own parameters and buffers, and the dictionaries that they are in."""
    for places in (module._parameters, module._buffers):
        for name, tensor in places.items():
            if tensor is not None:
                yield places, name, tensor
