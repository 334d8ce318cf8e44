"""Trainers for the drill: a process that forks one for each line of its input, as in `wt_trainer`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

from forking import fork_for_each_line

from vllm_wt.clients.relay import RelayClient, RelayServer
from vllm_wt.session import WeightSync
from vllm_wt.testing.models import ModelShape, random_model, randomize


class DrillTrainer:
    """The calls that the drill makes."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._model = random_model(shape, seed=0)
        self._sync: WeightSync | None = None

    def connect(self, staging: str) -> None:
        self._sync = WeightSync.connect(
            RelayClient(self._folder / "engine.sock"),
            backend="rdma",
            source=self._model,
            staging=staging,
        )

    def push(self, version: int, seed: int) -> float:
        """Seconds that the round took."""
        assert self._sync is not None
        randomize(self._model, seed)
        return self._sync.push(version).total_s

    def torn(self) -> bool:
        assert self._sync is not None
        (status,) = self._sync.status()
        assert status.error is None, status.error
        return status.torn


def main(folder: str, name: str, shape: dict[str, Any]) -> None:
    trainer = DrillTrainer(Path(folder), ModelShape(**shape))
    methods = {method: getattr(trainer, method) for method in ("connect", "push", "torn")}
    RelayServer(Path(folder) / name, methods)
    threading.Event().wait()  # until it is killed


def fork_trainers() -> None:
    # Imported, and nothing computed: threads that compute do not survive a fork.
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: F401

    fork_for_each_line(main)


if __name__ == "__main__":
    fork_trainers()
