"""A trainer process in vLLM's own form: runs the scripts that its input names, and answers each line.

What a script leaves in its names is there for the next one, as if they were one script.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

import torch

from vllm_wt.errors import WeightTransferError
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint


class NativeTrainer:
    """The calls that a test can make."""

    def __init__(self, folder: Path, shape: ModelShape, device: str) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"model": random_model(shape, seed=0).to(device)}

    def ready(self) -> None:
        """What is imported has been."""

    def let(self, **names: Any) -> None:
        """Set names of the scripts."""
        self._names |= names

    def run(self, script: str) -> None:
        found = runpy.run_path(script, init_globals=self._names)
        self._names |= {name: value for name, value in found.items() if name[:2] != "__"}

    def randomize(self, seed: int) -> str:
        """A training step; a checkpoint to compare with."""
        randomize(self._names["model"], seed)
        checkpoint = self._folder / f"native{seed}"
        save_checkpoint(self._names["model"], checkpoint)
        return str(checkpoint)

    def hold(self, number: int, flag: str) -> None:
        """Before the parcel of this number the trainer makes this file and goes on no more."""
        from vllm_wt_nccl.native_sending import Sending

        original = Sending._send

        def held(sending: Sending, at: int, parcel: Any) -> None:
            if at == number:
                Path(flag).touch()
                sys.stdin.read()  # for good
            original(sending, at, parcel)

        Sending._send = held  # type: ignore[method-assign]


def main() -> None:
    folder, shape, device = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = NativeTrainer(Path(folder), ModelShape(**shape), device)
    for line in sys.stdin:
        method, arguments, keywords = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(trainer, method)(*arguments, **keywords)}
        except WeightTransferError as error:
            answer = {"error": error.facts()}
        print(json.dumps(answer), flush=True)


main()
