"""The model's own loaders, run through vLLM's layerwise reload.

Arming puts every layer on meta; loading materializes, fills, post-processes and copies it into the
tensors that the engine already uses; finalizing puts the rest back. Here the three are one step, so
that no failure of a peer can leave a layer on meta.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_wt.bridge import compat
from vllm_wt.errors import LoadError
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES

logger = logging.getLogger(__name__)

_Destination = tuple[torch.nn.Module, str]


class LayerwiseReload:
    """Implements `vllm_wt.loading.apply.ModelLoader` for a live vLLM model.

    Args:
        model: The worker's model.
        vllm_config: Its configuration.
        device: Where it lives.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model: Any = model  # vLLM's models have load_weights, which nn.Module has not
        self._vllm_config = vllm_config
        self._device = device

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with compat.load_context(self._vllm_config, self._device):
            try:
                layerwise.initialize_layerwise_reload(self._model)
                self._model.load_weights(weights)
                layerwise.finalize_layerwise_reload(self._model, self._vllm_config.model_config)
                self._refresh_tied_heads()
            except BaseException:
                self._disarm()
                raise
        compat.synchronize(self._device)

    def rehearse(self, manifest: Manifest) -> None:
        names = {module: name for name, module in self._model.named_modules()}
        with compat.load_context(self._vllm_config, self._device):
            layerwise.initialize_layerwise_reload(self._model)
            stamps = _Stamps(self._model)
            try:
                self._model.load_weights(
                    (t.name, torch.empty(t.shape, dtype=DTYPES[t.dtype], device="meta"))
                    for t in manifest.tensors
                )
                missing = [
                    f"{names[module]}.{param}" for module, param in self._uncovered(stamps.written)
                ]
            except NotImplementedError as error:
                # A loader that looks at values cannot be rehearsed without them.
                logger.warning("vllm-wt: the load could not be rehearsed: %s", error)
                return
            except Exception as error:
                raise LoadError(
                    f"The model does not take these weights: {type(error).__name__}: {error}",
                    where=stamps.current,
                    expected="the names and shapes of the model's checkpoint",
                    cure="send the tensors under their checkpoint names and in full shape",
                ) from error
            finally:
                stamps.remove()
                self._disarm()
        if missing:
            raise LoadError(
                "Parameters of the model would keep their old values",
                expected="every parameter covered",
                got=f"{len(missing)} not or partly covered: {', '.join(sorted(missing)[:5])}",
                cure="send every tensor of the checkpoint",
            )

    def _uncovered(self, written: dict[_Destination, int]) -> Iterator[_Destination]:
        """Parameters that were not filled, except those that share memory with one that was."""
        places: dict[_Destination, int] = {}
        sizes: dict[_Destination, int] = {}
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.kernel_tensors is None:
                continue
            for name, param in info.kernel_tensors[0].items():
                if name not in compat.NEVER_LOADED:
                    places[module, name] = id(param)
            for name, param in get_layer_params_buffers(module)[0].items():
                sizes[module, name] = getattr(param, "weight_loader_numel", param.numel())
        filled = {places.get(key) for key, numel in written.items() if numel >= sizes.get(key, 0)}
        for key, size in sizes.items():
            if key in places and written.get(key, 0) < size and places[key] not in filled:
                yield key

    def _disarm(self) -> None:
        """Give every armed layer its own tensors back."""
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(module, info)
                info.reset()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload

    def _refresh_tied_heads(self) -> None:
        """Rebuild packed copies that only CPU keeps of a head tied to the embedding.

        The head receives no weights of its own, so vLLM 0.25 to 0.33 does not post-process it.
        """
        if self._device.type != "cpu":
            return
        owners: dict[int, torch.nn.Module] = {}
        for module in self._model.modules():
            weight = module._parameters.get("weight")
            if weight is None:
                continue
            method = getattr(module, "quant_method", None)
            if id(weight) in owners and isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
            owners.setdefault(id(weight), module)


class _Stamps:
    """Wraps every weight loader of an armed model, to note how much of which parameter it fills."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.written: dict[_Destination, int] = {}
        self.current: str | None = None
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
            self.written[module, name] = self.written.get((module, name), 0) + counter.numel
            self.current = None
            return result

        self._undo.append((tensor, previous))
        tensor.weight_loader = stamped  # type: ignore[attr-defined]

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
