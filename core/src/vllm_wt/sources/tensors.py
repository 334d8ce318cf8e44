"""Sources for tensors that the trainer has at hand: of a module, a mapping or a list."""

from __future__ import annotations

import operator
import sys
from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.exposed import placed
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of
from vllm_wt.sources.base import WeightSource
from vllm_wt.sources.whole import is_dtensor, is_gathered, is_sharded, require_sendable, whole

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _Look:
    """What a source had at one time, and where; made in every push, and so in little time."""

    def __init__(self, names: list[Any], objects: list[Any], values: list[Any]) -> None:
        self._names = names
        self._objects = objects
        self._values = values
        # `tensor.data = other` leaves the object, and what was detached from it, as they were.
        self._placed: tuple[list[Any], ...] | None = None
        self._addresses: dict[int, int] = {}

    def keep(self) -> _Look | None:
        """For a later comparison; None where these tensors cannot be compared."""
        if any(type(value) not in _PLAIN for value in self._values):
            return None
        self._placed = placed(self._values)
        self._addresses = dict(zip(map(id, self._values), self._placed[0], strict=True))
        return self

    def had(self, value: torch.Tensor, address: int) -> bool:
        """Whether this value was there then, at this address."""
        return self._addresses.get(id(value)) == address

    def is_same(self, kept: _Look) -> bool:
        """Whether all is as it was when ``kept`` was."""
        return (
            self._names == kept._names
            and len(self._objects) == len(kept._objects)
            and all(map(operator.is_, self._objects, kept._objects))
            and placed(self._values) == kept._placed
        )


class TensorSource(WeightSource):
    """What the sources of this file share.

    Plain tensors are yielded as they are. A DTensor is described by its full shape; a pass yields
    its local tensor where that has all values (replicated, or a mesh of one rank), and gathers any
    other. A gather is a collective: all ranks of the mesh must walk the source, in the same order.

    Raises:
        InvalidInfo: From :meth:`manifest`, :attr:`made` and a pass, for a value that cannot be sent.
    """

    _where = "source"
    _last: _Look | None = None

    @abstractmethod
    def _items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The names and values as they are now."""

    def _look(self) -> _Look | None:
        """What :meth:`_items` goes by, in little time; None where it can't be told."""
        return None

    def manifest(self) -> Manifest:
        return Manifest(tuple(meta_of(name, tensor) for name, tensor in self._checked()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checked():
            yield name, whole(name, tensor, where=self._where)

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._last = None
        look = self._look()
        look = None if look is None else look.keep()
        for name, tensor in self._checked():
            if is_dtensor(tensor):
                look = None
            if is_gathered(tensor):
                continue
            full = whole(name, tensor, where=self._where)
            # Else another thread has moved it in between, and what is yielded is not what was seen.
            if look is not None and not look.had(tensor, full.data_ptr()):
                look = None
            yield name, full
        self._last = look  # whoever asked has taken all of it

    def distributed(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            pair for pair in (self._detached() if self._yields_items else ()) if is_dtensor(pair[1])
        )

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._detached() if self._yields_items else iter(self)

    @property
    def _yields_items(self) -> bool:
        """Whether a pass is over :meth:`_items`: a class derived from these may make others of them."""
        return type(self).__iter__ is TensorSource.__iter__

    def _detached(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self._checked())

    def is_same(self) -> bool:
        last, now = self._last, self._look()
        return last is not None and now is not None and now.is_same(last)

    @property
    def device(self) -> torch.device:
        """That of the first tensor."""
        items = self._checked()
        return items[0][1].device if items else torch.device("cpu")

    @property
    def made(self) -> frozenset[str]:
        """Names of the DTensors that are gathered."""
        return frozenset(name for name, tensor in self._checked() if is_gathered(tensor))

    def _checked(self) -> list[tuple[str, torch.Tensor]]:
        """All of them or an error: a rank that stopped half-way would leave others in a gather."""
        items = list(self._items())
        for name, value in items:
            require_sendable(name, value, where=self._where)
        return items


class StateDictSource(TensorSource):
    """Weights of a mapping of names to tensors or DTensors, read anew at each pass.

    Args:
        state: The mapping; its tensors may change in place or be replaced between rounds.
    """

    _where = "state dict"

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def _items(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._state.items()

    def _look(self) -> _Look | None:
        if type(self) is not StateDictSource:  # which may go by something else
            return None
        values = list(self._state.values())
        return _Look(list(self._state), values, values)


class PairsSource(TensorSource):
    """Weights of a list of ``(name, tensor)`` pairs, or of ``state.items()``, in their order.

    Args:
        pairs: Walked anew at each pass, so no generator.
    """

    _where = "list of pairs"

    def __init__(self, pairs: Sequence[Any] | ItemsView[Any, Any]) -> None:
        self._pairs = pairs

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self._pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InvalidInfo(
                    f"Item {index} is not a pair",
                    where=self._where,
                    expected="(name, tensor)",
                    got=f"{type(pair).__name__} of {len(pair)}"
                    if isinstance(pair, tuple | list)
                    else type(pair).__name__,
                    cure="give (name, tensor) pairs, or the mapping itself",
                )
            yield pair[0], pair[1]


class ModuleSource(TensorSource):
    """Parameters of a module, each storage once, as ``module.named_parameters()`` yields them.

    Frozen ones are among them, and so are FSDP2's and tensor parallelism's DTensors.

    Args:
        module: A module whose parameters have the checkpoint's names.
        buffers: Send the persistent buffers too, after the parameters. Some checkpoints have weights
            that are buffers in the trainer (DeepSeek's ``e_score_correction_bias``); others would
            send what no checkpoint has, and the engine refuses that.
    """

    _where = "module"

    def __init__(self, module: torch.nn.Module, *, buffers: bool = False) -> None:
        self._module = module
        self._buffers = buffers

    @property
    def made(self) -> frozenset[str]:
        """Names of the DTensors that are gathered, and of what FSDP2 has gathered for a forward.

        FSDP2 leaves the root's parameters gathered after a forward, and later takes their memory
        away under whoever still holds them.
        """
        fsdp2 = tuple(_fsdp2_prefixes(self._module))
        return frozenset(
            name
            for name, tensor in self._checked()
            if is_gathered(tensor) or (name.startswith(fsdp2) and not is_sharded(tensor))
        )

    def _look(self) -> _Look | None:
        if type(self) is not ModuleSource or self._buffers or _has_own_names(self._module):
            return None
        root = self._module
        modules: list[torch.nn.Module] = [root]
        seen = {id(root)}
        names: list[Any] = []
        objects: list[Any] = []
        for module in modules:  # which grows meanwhile
            names += (list(module._modules), list(module._parameters))
            objects += (module, *module._modules.values(), *module._parameters.values())
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        fsdp2 = _fsdp2_class()
        if fsdp2 is not None and any(isinstance(module, fsdp2) for module in modules):
            return None  # it gathers, and takes away again, at times of its own
        values = [p for module in modules for p in module._parameters.values() if p is not None]
        return _Look(names, objects, values)

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        _refuse_fsdp1(self._module)
        yield from self._module.named_parameters()
        if self._buffers:
            persistent = self._module.state_dict(keep_vars=True).keys()
            yield from ((n, b) for n, b in self._module.named_buffers() if n in persistent)


def _has_own_names(module: torch.nn.Module) -> bool:
    """Whether a module names its parameters in a way of its own."""
    cls = torch.nn.Module
    return any(
        getattr(type(module), name) is not getattr(cls, name) or name in module.__dict__
        for name in ("named_parameters", "named_modules", "_named_members")
    )


def _fsdp2_class() -> type | None:
    """None where nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def _fsdp2_prefixes(module: torch.nn.Module) -> Iterator[str]:
    cls = _fsdp2_class()
    if cls is not None:
        for name, sub in module.named_modules():
            if isinstance(sub, cls):
                yield f"{name}." if name else ""


def _refuse_fsdp1(module: torch.nn.Module) -> None:
    """With ``use_orig_params`` its parameters look plain, but are pieces of a flat one."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if cls is not None:
        for name, sub in module.named_modules():
            if isinstance(sub, cls):
                raise InvalidInfo(
                    f"The module {name!r} is sharded by FSDP1",
                    where="module",
                    expected="a plain module, or one sharded by FSDP2 or as DTensors",
                    got="FullyShardedDataParallel",
                    cure="shard with torch.distributed.fsdp.fully_shard, or give a full state dict",
                )
