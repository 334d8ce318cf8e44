"""What modules of vLLM's keep of the weights of others, and its reload leaves as it was."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


def refresh(model: torch.nn.Module, device: torch.device) -> None:
    """Make it anew, after the weights were loaded; only a CPU's kernels keep such things."""
    if device.type == "cpu":
        _refresh_tied_heads(model)
        _refresh_convolutions(model)


def _refresh_tied_heads(model: torch.nn.Module) -> None:
    """Packed copies of a head tied to the embedding.

    The head receives no weights of its own, so vLLM 0.25 to 0.33 does not post-process it.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        method = getattr(module, "quant_method", None)
        if id(weight) in owners and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
        owners.setdefault(id(weight), module)


def _refresh_convolutions(model: torch.nn.Module) -> None:
    """Mamba-2's view of its convolution, which is one no more where the weight has been packed."""
    for module in model.modules():
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        kept = module._buffers.get("conv_weights")
        if unpacked is not None and kept is not None:
            kept.copy_(unpacked.view_as(kept))
