"""The trainer's process of ``vllm-wt bench wire``: owns the tensors, and polls for both sides."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from vllm_wt import registry
from vllm_wt.clients.relay import RelayServer
from vllm_wt.deadline import Deadline
from vllm_wt.info import Verify
from vllm_wt.pull import PullTrainer
from vllm_wt.source import StateDictSource

VERIFY: tuple[Verify, ...] = ("digest", "bytes")
"""The ways of verifying that are measured."""
_POLL_S = 0.001
_ROUND_S = 120.0


class Owner:
    """What the reading process asks for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._device = torch.device(config["device"])
        numel = config["nbytes"] // config["tensors"] // 2
        self._state = {
            f"w{index}": torch.randn(numel, device=self._device).to(torch.bfloat16)
            for index in range(config["tensors"])
        }
        backend = config["backend"]
        self.trainers = {
            verify: PullTrainer(
                StateDictSource(self._state),
                backend=backend,
                transport_cls=registry.resolve(config["transport"], backend=backend),
                verify=verify,
                staging="device",
            )
            for verify in VERIFY
        }
        self._sending: threading.Thread | None = None
        self.raw = registry.resolve(config["baseline"], backend=backend)(
            f"raw-owner-{os.getpid()}", self._device
        )
        self._last = next(reversed(self._state.values()))

    def describe(self, verify: Verify) -> dict[str, Any]:
        return self.trainers[verify].describe(Deadline(_ROUND_S)).to_wire()

    def publish(self, verify: Verify, version: int) -> dict[str, Any]:
        """Publish, and send on a thread, so that the reader can begin."""
        self._last.fill_(version)
        deadline = Deadline(_ROUND_S)
        trainer = self.trainers[verify]
        trainer.publish(version, deadline)
        self._sending = threading.Thread(
            target=trainer.send, args=(1, deadline, lambda: None), daemon=True
        )
        self._sending.start()
        return trainer.update_info("open", deadline, known=trainer.generation).to_wire()

    def sent(self) -> None:
        """The round is over on this side, too."""
        if self._sending is not None:
            self._sending.join()

    def expose_raw(self) -> str:
        nbytes = sum(t.numel() * t.element_size() for t in self._state.values())
        self._buffer = torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, device=self._device
        )  # kept, since the fabric does not hold it
        handle: str = self.raw.expose(self._buffer)
        return handle

    def last_value(self) -> float:
        return float(self._last[-1].item())


def main(config: dict[str, Any]) -> None:
    """Serve until the parent ends this process."""
    owner = Owner(config)
    never = threading.Event()
    for trainer in owner.trainers.values():
        threading.Thread(target=trainer.serve, args=(never,), daemon=True).start()
    methods = ("describe", "publish", "sent", "expose_raw", "last_value")
    RelayServer(Path(config["socket"]), {name: getattr(owner, name) for name in methods})
    parent = os.getppid()
    while os.getppid() == parent:
        owner.raw.progress()
        never.wait(_POLL_S)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
