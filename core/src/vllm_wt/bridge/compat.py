"""What differs between vLLM releases, and what we need of vLLM's process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from vllm_wt.ranks import GroupRanks, Ranks, SingleRank

try:
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
except ImportError:  # 0.26, where "bias" was not yet set apart from the rest
    SKIP_LOAD_TENSORS = SKIP_TENSORS

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:  # up to 0.27

    def is_deferred_attention_layer(layer: torch.nn.Module) -> bool:
        return isinstance(layer, Attention | MLAAttention)


NEVER_LOADED: frozenset[str] = frozenset(SKIP_LOAD_TENSORS)
"""Names of tensors that a layerwise reload does not load."""

NEVER_ARMED: frozenset[str] = frozenset(SKIP_TENSORS)
"""Names of tensors that a layerwise reload leaves where they are."""


def is_deferred_attention(module: torch.nn.Module) -> bool:
    """Whether vLLM processes a module after all others, from what these hold then."""
    return bool(is_deferred_attention_layer(module))


def worker_ranks(parallel_config: Any) -> Ranks:
    """The workers of this engine: one data-parallel replica, tensor and pipeline parallel.

    They get a process group of their own, so that an exchange that fails disturbs none of vLLM's.
    Every worker must call this at the same point, which the engine's constructor is.
    """
    size = parallel_config.world_size
    if size == 1:
        return SingleRank()
    mine: Any = None
    for first in range(0, dist.get_world_size(), size):  # the world spans coordinated replicas
        members = list(range(first, first + size))
        group = dist.new_group(members, backend="gloo")
        if dist.get_rank() in members:
            mine = group
    return GroupRanks(mine)


@contextmanager
def device_context(device: torch.device) -> Iterator[None]:
    """Select the worker's device on a thread of our own."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


@contextmanager
def load_context(vllm_config: Any, device: torch.device | None) -> Iterator[None]:
    """What loaders expect around them; 0.25 and 0.26 set neither for weight transfer.

    Args:
        vllm_config: The engine's.
        device: Where new tensors go. None where loaders make none: torch then asks at every
            operation, which is a third of a rehearsal's time.
    """
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(vllm_config))
        if device is not None:
            stack.enter_context(torch.device(device))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_default_dtype(vllm_config))
        yield


@contextmanager
def _default_dtype(vllm_config: Any) -> Iterator[None]:
    """The model's, as at the first load: some kernels are set up for the default dtype."""
    before = torch.get_default_dtype()
    model_config = vllm_config.model_config
    torch.set_default_dtype(before if model_config is None else model_config.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device has happened."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
