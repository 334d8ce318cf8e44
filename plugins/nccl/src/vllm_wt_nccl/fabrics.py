"""Which library carries the broadcasts: NCCL between GPUs, gloo between hosts' memories."""

from __future__ import annotations

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt_nccl.communicator import Communicator


def opened(
    store: Store,
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    seconds: float,
    *,
    is_pair: bool = False,
) -> Communicator:
    """A communicator, made by all its ranks at the same time.

    Args:
        store: By which the ranks find each other; new for each communicator.
        rank: Of this side.
        size: All ranks.
        address: Of this host, by which the others reach it; NCCL finds its own way.
        device: Of the buffers.
        seconds: For making it.
        is_pair: Whether it is one of many of two ranks each, which share this process and its GPU.

    Raises:
        WeightTransferError: A rank has not come, or cannot be reached; or the ranks don't fit together.
    """
    if device.type == "cuda":
        from vllm_wt_nccl.nccl import NcclCommunicator  # which needs a GPU's libraries

        return NcclCommunicator(store, rank, size, device, seconds, is_pair=is_pair)
    from vllm_wt_nccl.gloo import GlooCommunicator

    return GlooCommunicator(store, rank, size, address, seconds, is_pair=is_pair)
