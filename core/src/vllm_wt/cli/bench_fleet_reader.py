"""A reader's process of ``vllm-wt bench fleet``: what a worker receives with, without vLLM."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_wt import registry
from vllm_wt.cli.bench_fleet_serving import serve
from vllm_wt.cli.bench_overlap_trainer import sha256
from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.loading.staging import Staging
from vllm_wt.pull import PullEngine
from vllm_wt.transport import Progress, Transport

_ROUND_S = 120.0
_METHODS = ("connect", "receive", "content", "die_after", "connect_raw", "read_raw")


class Reader:
    """What the command asks for.

    Args:
        backend: A Transport.
        device: Where it receives.
        rank: Of this reader.
        size: Readers in all.
    """

    def __init__(self, backend: str, device: str, rank: int, size: int) -> None:
        torch.set_num_threads(1)  # as in a worker of vLLM's on a CPU
        self._context = WorkerContext(
            backend=backend, device=torch.device(device), rank=rank, size=size
        )
        self._spec = registry.default().get(backend).spec
        self._engines: dict[str, PullEngine] = {}
        self._nbytes = 0
        self._left: int | None = None
        """Bytes until this process kills itself, if it is to."""

    def connect(self, side: str, init_info: dict[str, Any]) -> None:
        transport = registry.resolve(str(self._spec.transport), backend=self._spec.name)
        engine = PullEngine(self._context, counting(transport, self._come))
        init = engine.init_info_cls.from_wire(init_info, backend=self._spec.name)
        self._manifest = init.manifest()
        self._nbytes = self._manifest.nbytes
        engine.init_transfer_engine(init)
        self._engines[side] = engine

    def receive(self, side: str, update_info: dict[str, Any]) -> tuple[float, float]:
        """When it began and ended, by the clock that all processes of a host have."""
        engine = self._engines[side]
        staging = Staging(self._manifest)
        began = time.monotonic()
        update = engine.update_info_cls.from_wire(update_info, backend=self._spec.name)
        engine.receive_weights(update, staging)
        ended = time.monotonic()
        staging.require_complete()
        self._received = staging
        return began, ended

    def content(self) -> str:
        """Of all that was received last."""
        return sha256(tensor for _, tensor in self._received.weights())

    def die_after(self, share: float) -> None:
        """In the next round, by SIGKILL, when this share of the bytes has come."""
        self._left = int(share * self._nbytes)

    def _come(self, nbytes: int) -> None:
        if self._left is not None:
            self._left -= nbytes
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def connect_raw(self, handle: str) -> None:
        device = self._context.device
        baseline = registry.resolve(str(self._spec.baseline), backend=self._spec.name)
        self._raw = baseline(f"raw-{os.getpid()}", device)
        self._target = torch.zeros(self._nbytes, dtype=torch.uint8, device=device)
        self._raw.connect(handle, self._target, len(self._manifest))

    def read_raw(self) -> tuple[float, float]:
        """As of `receive`, of one bare read."""
        began = time.monotonic()
        self._raw.read(Deadline(_ROUND_S))
        return began, time.monotonic()


def counting(transport_cls: type[Transport], come: Callable[[int], None]) -> type[Transport]:
    """The same transport, which tells of all bytes as they come."""

    def submit(self: Any, plan: Any) -> Any:
        self._told = 0
        return base.submit(self, plan)

    def poll(self: Any, operation: Any) -> Progress:
        progress: Progress = base.poll(self, operation)
        come(progress.nbytes - self._told)
        self._told = progress.nbytes
        return progress

    base: Any = transport_cls
    return type(
        f"Counting{transport_cls.__name__}", (transport_cls,), {"submit": submit, "poll": poll}
    )


def main(config: dict[str, Any]) -> None:
    """Serve until the parent ends this process, or it has to die."""
    path = config.pop("socket")
    serve(path, Reader(**config), _METHODS)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
