"""A trainer process whose weights are those of checkpoints, driven over a relay.

It ends when its input does: with the test, whichever way that ends.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vllm_wt.clients.relay import RelayClient, RelayServer
from vllm_wt.session import WeightSync

_REPEATS = 10


class Trainer:
    """The calls that a test can make."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._weights: dict[str, torch.Tensor] = {}
        self._sync: WeightSync | None = None

    def load(self, checkpoint: str) -> None:
        """The weights of a checkpoint; from the second on where those of the first are."""
        from safetensors.torch import load_file

        loaded = load_file(Path(checkpoint) / "model.safetensors")
        if not self._weights:
            self._weights = {name: value.to(self._device) for name, value in loaded.items()}
            return
        assert loaded.keys() == self._weights.keys()
        for name, value in loaded.items():
            self._weights[name].copy_(value)

    def make(self, checkpoint: str) -> None:
        """Random weights, made on the device, for a folder that has no more than a configuration."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(checkpoint)
        with torch.device(self._device):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        self._weights = {name: param.detach() for name, param in model.named_parameters()}

    def change(self) -> None:
        for weight in self._weights.values():
            weight.mul_(1.01)

    def connect(self, engine: str) -> None:
        self._sync = WeightSync.connect(RelayClient(engine), backend="rdma", source=self._weights)

    def push(self, version: int) -> dict[str, Any]:
        assert self._sync is not None
        return asdict(self._sync.push(version))

    def flat_copy_s(self) -> float:
        """Seconds of one copy of as many bytes on the device, the median of some."""
        nbytes = sum(weight.numel() * weight.element_size() for weight in self._weights.values())
        source = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(_REPEATS):
            self._synchronize()
            began = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main(socket: str, device: str) -> None:
    assert "vllm" not in sys.modules
    sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without
    trainer = Trainer(device)
    names = ("load", "make", "change", "connect", "push", "flat_copy_s")
    server = RelayServer(socket, {name: getattr(trainer, name) for name in names})
    sys.stdin.read()
    server.close()


main(*sys.argv[1:])
