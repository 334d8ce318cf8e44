"""Sources for tensors that the trainer has at hand: of a module, a mapping or a list."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of
from vllm_wt.sources.base import WeightSource
from vllm_wt.sources.whole import is_gathered, is_sharded, require_sendable, whole


class TensorSource(WeightSource):
    """What the sources of this file share.

    Plain tensors are yielded as they are. A DTensor is described by its full shape; a pass yields
    its local tensor where that has all values (replicated, or a mesh of one rank), and gathers any
    other. A gather is a collective: all ranks of the mesh must walk the source, in the same order.

    Raises:
        InvalidInfo: From :meth:`manifest`, :attr:`made` and a pass, for a value that cannot be sent.
    """

    _where = "source"

    @abstractmethod
    def _items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The names and values as they are now."""

    def manifest(self) -> Manifest:
        return Manifest(tuple(meta_of(name, tensor) for name, tensor in self._checked()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checked():
            yield name, whole(name, tensor, where=self._where)

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checked():
            if not is_gathered(tensor):
                yield name, whole(name, tensor, where=self._where)

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

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        _refuse_fsdp1(self._module)
        yield from self._module.named_parameters()
        if self._buffers:
            persistent = self._module.state_dict(keep_vars=True).keys()
            yield from ((n, b) for n, b in self._module.named_buffers() if n in persistent)


def _fsdp2_prefixes(module: torch.nn.Module) -> Iterator[str]:
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
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
