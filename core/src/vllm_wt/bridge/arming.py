"""vLLM's layerwise reload, taken apart.

An armed module has tensors on the meta device in the checkpoint's layout, and its own ones are set
aside. Whoever arms a module gives it these back in the same step, whatever fails in between: a layer
that is left on meta ends the server at the next request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
)

Write = Callable[[torch.Tensor], None]
"""Fills a parameter that it is given."""


class Modules:
    """Some modules of a model, in its place: vLLM's reload asks it for nothing else."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = list(modules)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules)


Armed = torch.nn.Module | Modules


def arm(modules: Armed) -> None:
    layerwise.initialize_layerwise_reload(modules)


def finalize(modules: Armed, model_config: Any) -> None:
    """Process what has been loaded, and give every module its own tensors back."""
    layerwise.finalize_layerwise_reload(modules, model_config)


def disarm(modules: Armed) -> None:
    """Give every armed module its own tensors back, as they are."""
    for module in modules.modules():
        info = layerwise.get_layerwise_info(module)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            info.reset()
            _unwrap_loaders(module)
    if hasattr(modules, "_original_do_torchao_reload"):
        modules._do_torchao_reload = modules._original_do_torchao_reload  # type: ignore[union-attr]


def use_own_loaders(modules: Armed) -> None:
    """Let armed modules load at once, into tensors on meta: nothing comes of it."""
    for module in modules.modules():
        _unwrap_loaders(module)


def _unwrap_loaders(module: torch.nn.Module) -> None:
    for tensor in get_layer_tensors(module).values():
        if getattr(tensor, "weight_loader", None) is not None:
            tensor.weight_loader = layerwise._get_original_loader(tensor)


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What was set aside of an armed module's parameters; nothing if it is not armed."""
    info = layerwise.get_layerwise_info(module)
    return dict(info.kernel_tensors[0]) if info.kernel_tensors is not None else {}


def elements_to_load(module: torch.nn.Module) -> dict[str, int]:
    """How many elements fill each parameter of an armed module: all but declared padding."""
    return {
        name: getattr(param, "weight_loader_numel", param.numel())
        for name, param in get_layer_params_buffers(module)[0].items()
    }


def reload(module: torch.nn.Module, writes: dict[str, Write]) -> None:
    """Load one module anew by vLLM's own steps, which post-process it and keep its addresses.

    Args:
        module: It is armed, filled, processed and copied into the tensors it had.
        writes: What fills its parameters and buffers, by name, in the checkpoint's layout.
    """
    one = Modules([module])
    attributes = dict(vars(module))
    loaders = {name: _loader(write) for name, write in writes.items()}
    try:
        arm(one)
        info = layerwise.get_layerwise_info(module)
        with _loading_by(loaders, get_layer_tensors(module)):
            for name, loader in loaders.items():
                info.loaded_weights.append((name, inspect.signature(loader).bind(None)))
            layerwise._layerwise_process(module, info)
    except BaseException:
        disarm(one)
        vars(module).update(attributes)  # a kernel that was set up halfway is of no use
        raise


def _loader(write: Write) -> Write:
    """As vLLM calls one: by a name, and with ``param`` as the name of its argument."""

    def load(param: torch.Tensor) -> None:
        write(param)

    return load


@contextmanager
def _loading_by(loaders: dict[str, Write], tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Put loaders on armed tensors, from which vLLM makes the real ones, and take them off again."""
    former = {name: getattr(tensors[name], "weight_loader", None) for name in loaders}
    try:
        for name, loader in loaders.items():
            tensors[name].weight_loader = loader  # type: ignore[attr-defined]
        yield
    finally:
        for name, own in former.items():
            if own is None:
                del tensors[name].weight_loader  # type: ignore[attr-defined]
            else:
                tensors[name].weight_loader = own  # type: ignore[attr-defined]
