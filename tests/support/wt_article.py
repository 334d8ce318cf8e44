"""The custom engine of vLLM's article on its weight-sync API, as printed there but for its imports.

What stands for ``...`` there is filled in: weights are handed over as a safetensors file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_wt.native import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


# define custom dataclasses for initialization and update weights metadata
@dataclass
class MyInitInfo(WeightTransferInitInfo):
    """Custom initialization info."""

    folder: str


@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    """Custom update info."""

    file: str
    names: list[str]
    fail_on: int | None = None
    stall_on: int | None = None
    deadline_s: float = 60.0


# custom weight transfer engine
class MyWeightTransferEngine(WeightTransferEngine):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def init_transfer_engine(self, init_info: MyInitInfo):
        self.folder = Path(init_info.folder)
        self.given_up = threading.Event()

    def start_weight_update(self):
        self.given_up.clear()

    def receive_weights(
        self,
        update_info: MyUpdateInfo,
        load_weights: Callable[[list[tuple[str, Tensor]]], None],
    ):
        buffer = torch.empty(1 << 20)  # one for all tensors, one after another
        with safe_open(self.folder / update_info.file, "pt") as file:
            for name in update_info.names:
                tensor = file.get_tensor(name)
                part = buffer[: tensor.numel()].view(tensor.shape)
                load_weights([(name, part.copy_(tensor))])
        buffer.fill_(float("nan"))
        if update_info.fail_on == self.context.rank:
            raise OSError("injected")
        if update_info.stall_on == self.context.rank:
            self.given_up.wait()
            raise OSError("given up")

    def abort_weight_update(self, reason: str):
        self.given_up.set()

    @classmethod
    def trainer_send_weights(
        cls,
        iterator: Iterator[tuple[str, Tensor]],
        trainer_args: dict[str, Any] | Any,
    ):
        tensors = {name: tensor.detach() for name, tensor in iterator}
        save_file(tensors, trainer_args["file"])
        return list(tensors)


# finally, register the weight transfer engine
WeightTransferEngineFactory.register_engine("my_weight_transfer", MyWeightTransferEngine)
