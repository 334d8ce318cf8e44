"""Trainers and workers of the native form, on threads and in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from vllm_wt.engine import WorkerContext
from vllm_wt_nccl import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm_wt_nccl.native_group import Group

HOST = "127.0.0.1"
SECONDS = 30.0
"""Deadline of what is to succeed."""
TENSORS = {
    "a": torch.arange(2000.0).view(40, 50),
    "empty": torch.zeros(0, 3),
    "ints": torch.arange(7),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "strided": torch.arange(3000.0)[::3],
    "last": torch.arange(600, dtype=torch.float16),
}
_SCRIPT = Path(__file__).with_name("native_process.py")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def in_background(function: Callable[[], Any]) -> Future[Any]:
    executor = ThreadPoolExecutor(1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def worker(rank: int = 0, size: int = 1, replica: int = 0) -> NCCLWeightTransferEngine:
    context = WorkerContext(
        backend="nccl", device=torch.device("cpu"), rank=rank, size=size, replica=replica
    )
    return NCCLWeightTransferEngine(context)


def joining(
    engine: NCCLWeightTransferEngine,
    port: int,
    world_size: int,
    rank_offset: int = 1,
    address: str = HOST,
    **more: Any,
) -> Future[Any]:
    """The worker's init, under way."""
    given = {"deadline_s": SECONDS} | more
    info = NCCLWeightTransferInitInfo(address, port, rank_offset, world_size, **given)
    return in_background(lambda: engine.init_transfer_engine(info))


def trainer_init(port: int, world_size: int, address: str = HOST, **more: Any) -> Group:
    given = {"master_address": address, "master_port": port, "world_size": world_size}
    return NCCLWeightTransferEngine.trainer_init(given | {"deadline_s": SECONDS} | more)


def met(workers: list[NCCLWeightTransferEngine]) -> Group:
    """A group of these, which are one engine's."""
    port = free_port()
    futures = [joining(each, port, 1 + len(workers)) for each in workers]
    group = trainer_init(port, 1 + len(workers))
    for future in futures:
        future.result()
    return group


def announced(tensors: dict[str, torch.Tensor], **how: Any) -> NCCLWeightTransferUpdateInfo:
    return NCCLWeightTransferUpdateInfo(
        names=list(tensors),
        dtype_names=[str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        shapes=[list(each.shape) for each in tensors.values()],
        **({"deadline_s": SECONDS} | how),
    )


def receiving(
    engine: NCCLWeightTransferEngine, info: NCCLWeightTransferUpdateInfo
) -> Future[dict[str, torch.Tensor]]:
    """The worker's part in a round, under way; what has come."""
    came: dict[str, torch.Tensor] = {}

    def receive() -> dict[str, torch.Tensor]:
        engine.start_weight_update()
        engine.receive_weights(
            info, lambda weights: came.update((name, each.clone()) for name, each in weights)
        )
        return came

    return in_background(receive)


def send(group: Any, tensors: Any = None, **how: Any) -> None:
    given = TENSORS.items() if tensors is None else tensors
    NCCLWeightTransferEngine.trainer_send_weights(
        iterator=iter(given), trainer_args={"group": group, "deadline_s": SECONDS} | how
    )


class Side:
    """A trainer or a worker in a process of its own; see native_process.py.

    Args:
        role: ``"trainer"`` or ``"worker"``.
        port: Of the trainer.
    """

    def __init__(self, role: str, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), role, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until(self, word: str) -> None:
        """It says this."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
