"""What differs between vLLM releases, and what we need of vLLM's process groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config

from vllm_wt.ranks import GroupRanks, Ranks, SingleRank

try:
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
except ImportError:  # 0.26, where "bias" was not yet set apart from the rest
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS as SKIP_LOAD_TENSORS

NEVER_LOADED: frozenset[str] = frozenset(SKIP_LOAD_TENSORS)
"""Names of tensors that a layerwise reload leaves where they are."""


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
def load_context(vllm_config: Any, device: torch.device) -> Iterator[None]:
    """What loaders expect around them; 0.25 and 0.26 set neither for weight transfer."""
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(torch.device(device))
        stack.enter_context(torch.inference_mode())
        yield


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device has happened."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
