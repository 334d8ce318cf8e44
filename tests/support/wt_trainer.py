"""Trainer processes, driven over a relay.

One process imports what they all need, which takes seconds, and forks a trainer for each line of its
input: the list of :func:`main`'s arguments, answered by the number of the new process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

from forking import fork_for_each_line
from wt_faults import resources

from vllm_wt.clients.relay import RelayClient, RelayServer
from vllm_wt.deadline import Deadline
from vllm_wt.session import WeightSync
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint


class Trainer:
    """The calls that a test can make."""

    def __init__(self, folder: Path, shape: ModelShape, device: str) -> None:
        self._folder = folder
        self._model = random_model(shape, seed=0).to(device)
        self._sync: WeightSync | None = None
        self.done = threading.Event()

    def connect(
        self,
        deadline_s: float = 60.0,
        url: str | None = None,
        options: dict[str, Any] | None = None,
        idle: bool = False,
        backend: str = "rdma",
        others: Sequence[str] = (),
        *,
        by: Callable[..., WeightSync] = WeightSync.connect,
    ) -> None:
        """Connect to the engine behind the relay, or at ``url``.

        Args:
            deadline_s: Of `WeightSync.connect`.
            url: Of a server.
            options: Of the backend.
            idle: The engine runs no forward pass within a push: its test sees to that.
            backend: Which.
            others: Relays of more engines.
            by: How.
        """
        engine: Any = url or RelayClient(self._folder / "engine.sock")
        if idle:
            engine.idle_between_calls = True
        engines = [engine, *(RelayClient(Path(path)) for path in others)]
        self._sync = by(
            engines, backend=backend, source=self._model, deadline_s=deadline_s, **(options or {})
        )

    def reconnect(self, *arguments: Any) -> None:
        """The same, with an engine whose trainer lives."""
        self.connect(*arguments, by=WeightSync.reconnect)

    def set_environment(self, name: str, value: str) -> None:
        """For what reads it later."""
        os.environ[name] = value

    def hold(self, bucket: int, flag: str) -> None:
        """Of the backend `nccl`: the next push makes this file and does not send this bucket, as long
        as there is the file."""
        assert self._sync is not None
        side: Any = self._sync._trainer
        original = side._broadcast

        def held(communicator: Any, number: int, deadline: Deadline) -> None:
            if number == bucket:
                side._broadcast = original
                Path(flag).touch()
                while Path(flag).exists():
                    self.done.wait(0.01)
            original(communicator, number, deadline)

        side._broadcast = held

    def randomize(self, seed: int, save: bool = True) -> str:
        """New weights; the folder of a checkpoint with them."""
        randomize(self._model, seed)
        folder = self._folder / f"seed{seed}"
        if save and not folder.exists():
            save_checkpoint(self._model, folder)
        return str(folder)

    def push(self, version: int, deadline_s: float = 60.0) -> dict[str, Any]:
        assert self._sync is not None
        return asdict(self._sync.push(version, deadline_s=deadline_s))

    def describe(self, deadline_s: float) -> dict[str, Any]:
        """The init info for an engine that has to find this trainer by itself."""
        assert self._sync is not None
        return self._sync._trainer.describe(Deadline(deadline_s)).to_wire()

    def torn(self) -> bool:
        assert self._sync is not None
        return self._sync.status()[0].torn

    def resources(self) -> dict[str, int]:
        return resources()

    def registrations(self) -> int:
        assert self._sync is not None
        return self._sync._trainer.generation

    def quit(self) -> None:
        if self._sync is not None:
            self._sync.close()
        self.done.set()


def main(folder: str, name: str, shape: dict[str, Any], device: str) -> None:
    trainer = Trainer(Path(folder), ModelShape(**shape), device)
    methods = {
        method: getattr(trainer, method)
        for method in (
            "connect",
            "reconnect",
            "hold",
            "describe",
            "randomize",
            "push",
            "torn",
            "resources",
            "set_environment",
            "registrations",
            "quit",
        )
    }
    server = RelayServer(Path(folder) / name, methods)
    trainer.done.wait()
    server.close()


def fork_trainers() -> None:
    # Imported, and nothing computed: threads that compute do not survive a fork.
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: F401

    fork_for_each_line(main)


fork_trainers()
