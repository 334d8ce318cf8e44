"""A trainer process with its model on CUDA: ``python gpu_trainer.py FOLDER NAME SHAPE``."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

from vllm_wt.clients.relay import RelayClient, RelayServer
from vllm_wt.session import WeightSync
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint


class Trainer:
    """The calls that a test can make."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._model = random_model(shape, seed=0).to("cuda")
        self._sync: WeightSync | None = None
        self.done = threading.Event()

    def connect(self) -> None:
        engine = RelayClient(self._folder / "engine.sock")
        self._sync = WeightSync.connect(engine, backend="rdma", source=self._model)

    def randomize(self, seed: int) -> str:
        """New weights; the folder of a checkpoint with them."""
        folder = self._folder / f"seed{seed}"
        randomize(self._model, seed)
        save_checkpoint(self._model, folder)
        return str(folder)

    def push(self, version: int) -> dict[str, Any]:
        assert self._sync is not None
        return asdict(self._sync.push(version))

    def generation(self) -> int:
        """How often memory was registered."""
        assert self._sync is not None
        return self._sync._trainer.generation


def main() -> None:
    folder, name, shape = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    trainer = Trainer(folder, ModelShape(**shape))
    methods = ("connect", "randomize", "push", "generation")
    RelayServer(folder / name, {method: getattr(trainer, method) for method in methods})
    trainer.done.wait()  # until it is killed


main()
