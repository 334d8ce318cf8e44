"""The trainer's process of ``vllm-wt bench fleet``: that of ``wire``, with other bytes each round."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

from vllm_wt.cli.bench_fleet_serving import serve
from vllm_wt.cli.bench_overlap_trainer import sha256
from vllm_wt.cli.bench_owner import Owner

_ODD = 0x5A5A
"""Makes another bfloat16 of each, so that nothing that is left from the round before is right."""
_METHODS = ("describe", "publish", "sent", "expose_raw", "content", "delivered")


class FleetOwner(Owner):
    """What the command asks for."""

    def publish(self, side: str, version: int) -> dict[str, Any]:
        for tensor in self._state.values():
            tensor.view(torch.int16).bitwise_xor_(_ODD + version)
        return super().publish(side, version)

    def content(self) -> str:
        """Of all that was published last."""
        return sha256(self._state.values())

    def delivered(self) -> int:
        """How many readers have told that they have all of it."""
        return self._sent.delivered()


def main(config: dict[str, Any]) -> None:
    """Serve until the parent ends this process."""
    owner = FleetOwner(config)
    never = threading.Event()
    for trainer in owner.trainers.values():
        threading.Thread(target=trainer.serve, args=(never,), daemon=True).start()
    serve(config["socket"], owner, _METHODS, owner.raw.progress)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
