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
from vllm_wt.backends import trainer_engine, transport_named
from vllm_wt.clients.relay import RelayServer
from vllm_wt.deadline import Deadline
from vllm_wt.info import Staging, Verify
from vllm_wt.manifest import Manifest
from vllm_wt.packing import Layout, meta_of
from vllm_wt.source import StateDictSource
from vllm_wt.spec import BackendSpec

SIDES: dict[str, tuple[Verify, Staging]] = {
    "digest": ("digest", "device"),
    "bytes": ("bytes", "device"),
}
"""What is measured of a backend: how it verifies, and where the worker receives."""
MAPPED: dict[str, tuple[Verify, Staging]] = {
    "digest": ("digest", "auto"),
    "bytes": ("bytes", "auto"),
    "received": ("bytes", "device"),
}
"""The same of one whose workers map the trainer's memory."""
_POLL_S = 0.001
_ROUND_S = 120.0


def transport_of(spec: BackendSpec, name: str = "") -> Any:
    """The Transport of a backend that is one; the default for an empty name."""
    if spec.transport is None:
        return None
    return transport_named(spec, name)


def baseline_of(spec: BackendSpec, name: str) -> str:
    """What a Transport is compared with."""
    return str(spec.baselines.get(name, spec.baseline))


def sides_of(spec: BackendSpec, name: str = "") -> dict[str, tuple[Verify, Staging]]:
    """What is measured of a backend."""
    transport = transport_of(spec, name)
    return MAPPED if transport is not None and transport.properties.maps else SIDES


def _exposable(
    state: dict[str, torch.Tensor], transport: Any, device: torch.device
) -> dict[str, torch.Tensor]:
    """The same tensors in memory that workers can map, as those of a trainer on their GPU are."""
    layout = Layout(Manifest(tuple(meta_of(name, tensor) for name, tensor in state.items())))
    views = dict(layout.views(transport.allocate(layout.nbytes, device)))
    for name, tensor in state.items():
        views[name].copy_(tensor)
    return views


class Owner:
    """What the reading process asks for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._device = torch.device(config["device"])
        numel = config["nbytes"] // config["tensors"] // 2
        backend = config["backend"]
        spec = registry.default().get(backend).spec
        name = config["transport"]
        options = {"transport": name} if name else {}
        transport = transport_of(spec, name)
        # In one piece: the bare fabric reads the same memory, by the same descriptors.
        self._buffer = torch.randn(numel * config["tensors"], device=self._device).bfloat16()
        self._state = {f"w{n}": each for n, each in enumerate(self._buffer.view(-1, numel))}
        if transport is not None and transport.properties.maps:
            self._state = _exposable(self._state, transport, self._device)
        self.trainers = {
            side: trainer_engine(
                backend, StateDictSource(self._state), verify=verify, staging=staging, **options
            )
            for side, (verify, staging) in sides_of(spec, name).items()
        }
        self._sending: threading.Thread | None = None
        self.raw = registry.resolve(baseline_of(spec, name), backend=backend)(
            f"raw-owner-{os.getpid()}", self._device
        )
        self._last = next(reversed(self._state.values()))

    def describe(self, side: str) -> dict[str, Any]:
        return self.trainers[side].describe(Deadline(_ROUND_S)).to_wire()

    def publish(self, side: str, version: int) -> dict[str, Any]:
        """Publish, and send on a thread, so that the reader can begin."""
        self._last.fill_(version)
        deadline = Deadline(_ROUND_S)
        trainer = self._sent = self.trainers[side]
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
            self._sent.settle()

    def expose_raw(self) -> str:
        handle: str = self.raw.expose(self._buffer.view(torch.uint8))
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
