"""The model's own loaders, run through vLLM's layerwise reload.

Arming puts every layer on meta; loading materializes, fills, post-processes and copies it into the
tensors that the engine already uses; finalizing puts the rest back. Here the three are one step, so
that no failure of a peer can leave a layer on meta.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from vllm_wt.bridge import compat, experts
from vllm_wt.bridge.stamps import Destination, Stamps
from vllm_wt.errors import LoadError
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes

logger = logging.getLogger(__name__)

_WORDS = 160
"""Characters of vLLM's own words in an error."""


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
        self._twins: list[tuple[str, str]] = []

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with compat.load_context(self._vllm_config, self._device):
            try:
                layerwise.initialize_layerwise_reload(self._model)
                self._model.load_weights(weights)
                layerwise.finalize_layerwise_reload(self._model, self._vllm_config.model_config)
                self._refresh_tied_heads()
                experts.refresh(self._model)
            except BaseException:
                self._disarm()
                raise
        compat.synchronize(self._device)

    def rehearse(self, manifest: Manifest) -> None:
        names = {module: name for name, module in self._model.named_modules()}
        with compat.load_context(self._vllm_config, self._device):
            experts.require_updatable(self._model, self._device)
            layerwise.initialize_layerwise_reload(self._model)
            stamps = Stamps(self._model)
            try:
                self._model.load_weights(stamps.storageless(manifest))
                places, sizes = self._places(), self._sizes()
                missing = [
                    f"{names[module]}.{param}"
                    for module, param in _uncovered(stamps.written, places, sizes)
                ]
                self._twins = stamps.twins(places, sizes)
            except NotImplementedError as error:
                # A loader that looks at values cannot be rehearsed without them.
                logger.warning("vllm-wt: the load could not be rehearsed: %s", error)
                return
            except Exception as error:
                raise LoadError(
                    f"The model does not take these weights: it refuses {stamps.sent!r}",
                    where=f"load_weights, {stamps.current or 'by name'}",
                    expected="the names and full shapes of the model's checkpoint",
                    got=_shortened(f"{type(error).__name__}: {error}"),
                    cure=_cure(stamps.sent),
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

    def check(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        values = dict(weights)
        for first, second in self._twins:
            if not torch.equal(as_bytes(values[first]), as_bytes(values[second])):
                raise LoadError(
                    f"{first!r} and {second!r} differ, and the model has one parameter for both",
                    where="seal",
                    expected="equal values, or one of the two",
                    got="different values",
                    cure=f"leave {second!r} out where the model ties them",
                )

    def _places(self) -> dict[Destination, int]:
        """Which parameters of an armed model share memory, by the identity of what they were."""
        places: dict[Destination, int] = {}
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.kernel_tensors is not None:
                for name, param in info.kernel_tensors[0].items():
                    if name not in compat.NEVER_LOADED:
                        places[module, name] = id(param)
        return places

    def _sizes(self) -> dict[Destination, int]:
        """How many elements fill each parameter of an armed model."""
        return {
            (module, name): getattr(param, "weight_loader_numel", param.numel())
            for module in self._model.modules()
            if layerwise.get_layerwise_info(module).kernel_tensors is not None
            for name, param in get_layer_params_buffers(module)[0].items()
        }

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


_WRAPPERS = {
    "_orig_mod.": "torch.compile has wrapped the module: give model._orig_mod",
    "module.": "data parallelism has wrapped the module: give model.module",
    "base_model.model.": "PEFT has wrapped the module: merge the adapter and give model.base_model",
}
"""What a wrapper puts before each name, and the way back."""


def _cure(name: str) -> str:
    for prefix, cure in _WRAPPERS.items():
        if name.startswith(prefix):
            return cure
    return "send the tensors under their checkpoint names and in full shape"


def _shortened(text: str) -> str:
    """vLLM lists all of its parameters, under names that no checkpoint has."""
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."


def _uncovered(
    written: dict[Destination, int], places: dict[Destination, int], sizes: dict[Destination, int]
) -> Iterator[Destination]:
    """Parameters that were not filled, except those that share memory with one that was."""
    filled = {places.get(key) for key, numel in written.items() if numel >= sizes.get(key, 0)}
    for key, size in sizes.items():
        if key in places and written.get(key, 0) < size and places[key] not in filled:
            yield key
