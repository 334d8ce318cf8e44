"""A trainer or a worker of a group of two that stays in the middle of a round."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from vllm_wt.engine import WorkerContext
from vllm_wt_nccl import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)


def held() -> None:
    print("held", flush=True)
    sys.stdin.read()  # for good


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(1000)
    yield "b", torch.zeros(1000)
    held()


def train(port: int) -> None:
    where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    group = NCCLWeightTransferEngine.trainer_init(where)
    print("met", flush=True)
    NCCLWeightTransferEngine.trainer_send_weights(tensors(), {"group": group})


def work(port: int) -> None:
    context = WorkerContext(backend="nccl", device=torch.device("cpu"), rank=0, size=1)
    engine = NCCLWeightTransferEngine(context)
    engine.init_transfer_engine(NCCLWeightTransferInitInfo("127.0.0.1", port, 1, 2))
    print("met", flush=True)
    update = NCCLWeightTransferUpdateInfo(["a", "b"], ["float32"] * 2, [[1000]] * 2)
    engine.receive_weights(update, lambda weights: held())


{"trainer": train, "worker": work}[sys.argv[1]](int(sys.argv[2]))
