"""What a rehearsal of the model's loaders would have written, and where."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES

Destination = tuple[torch.nn.Module, str]
"""A module and the name of its parameter."""


class Stamps:
    """Wraps every weight loader of an armed model, to note how much of which parameter it fills."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.written: dict[Destination, int] = {}
        """Elements that were written to each parameter."""
        self.current: str | None = None
        """The parameter whose loader runs, or ran when it failed."""
        self.sent = ""
        """The tensor that the model was given last."""
        self._by_name: dict[Destination, dict[str, int]] = {}
        self._undo: list[tuple[torch.Tensor, Any]] = []
        for module in model.modules():
            for name, tensor in get_layer_tensors(module).items():
                self._stamp(module, name, tensor)

    def _stamp(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        previous = getattr(tensor, "weight_loader", None)
        loader = default_weight_loader
        if previous is not None:
            loader = layerwise._get_original_loader(tensor)
        signature = inspect.signature(loader)

        @functools.wraps(loader)
        def stamped(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            param = bound.arguments.get("param")
            if isinstance(param, torch.Tensor) and not param.is_meta:
                bound.arguments["param"] = to_meta_tensor(param)
            self.current = f"{type(module).__name__}.{name}"
            with _WriteCounter() as counter:
                result = loader(*bound.args, **bound.kwargs)
            self._note((module, name), counter.numel)
            self.current = None
            return result

        self._undo.append((tensor, previous))
        tensor.weight_loader = stamped  # type: ignore[attr-defined]

    def storageless(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a manifest without their values, for the model's ``load_weights``."""
        for meta in manifest.tensors:
            self.sent = meta.name
            yield meta.name, torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device="meta")

    def twins(
        self, places: dict[Destination, int], sizes: dict[Destination, int]
    ) -> list[tuple[str, str]]:
        """Pairs of tensors each of which fills the same memory.

        Args:
            places: Equal for parameters that share memory.
            sizes: Elements that fill one.
        """
        fillers: dict[int, list[str]] = {}
        for destination, by_name in self._by_name.items():
            if destination in places:
                names = fillers.setdefault(places[destination], [])
                names += [n for n, numel in by_name.items() if numel >= sizes[destination]]
        return [(names[0], other) for names in fillers.values() for other in names[1:]]

    def _note(self, destination: Destination, numel: int) -> None:
        self.written[destination] = self.written.get(destination, 0) + numel
        by_name = self._by_name.setdefault(destination, {})
        by_name[self.sent] = by_name.get(self.sent, 0) + numel

    def remove(self) -> None:
        for tensor, previous in self._undo:
            if previous is None:
                del tensor.weight_loader  # type: ignore[attr-defined]
            else:
                tensor.weight_loader = previous  # type: ignore[attr-defined]


class _WriteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts elements written by copies and by fills, which is how loaders write padding."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in {
            torch.ops.aten.copy_.default,
            torch.ops.aten.fill_.Scalar,
            torch.ops.aten.zero_.default,
        }:
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))
