"""The trainer's process of ``vllm-wt bench overlap``, in which vllm cannot be imported."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_wt.clients.relay import RelayClient
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import DTYPES, as_bytes
from vllm_wt.pausing import PauseMode
from vllm_wt.serving import serving
from vllm_wt.session import WeightSync

_BEFORE_S = 2.0
"""Seconds in which tokens are counted before a pull; at 200 MB/s a pull of 400 MB takes as long."""
_EMPTY = 3
"""Pauses with nothing in them, a round."""
_SETTLED = 40
"""Tokens after which the engine generates evenly again: after a pause it first computes the KV cache of
its requests anew."""
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What vLLM's Qwen3 holds as one parameter."""


class TimedClient(RelayClient):
    """Notes when calls began and ended, by the clock that all processes of a host share.

    A pause waits for the step that runs, of which an unknown part is over. So that a pause with
    something in it can be compared with one without, each begins at the end of a step.
    """

    def __init__(self, path: Path, bench: RelayClient) -> None:
        super().__init__(path)
        self._bench = bench
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    @property
    def paused(self) -> tuple[float, float]:
        """The last pause, from its call until the engine had been let go on."""
        return self.began["pause"], self.ended["resume"]

    def pause(self, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        self._bench.call("tokens", 1)
        super().pause(mode, clear_cache)

    def call(self, method: str, *args: Any) -> Any:
        self.began[method] = time.monotonic()
        try:
            return super().call(method, *args)
        finally:
            self.ended[method] = time.monotonic()


def sha256(parts: Iterable[torch.Tensor]) -> str:
    """Of the bytes of tensors one after another."""
    found = hashlib.sha256()
    for part in parts:
        found.update(as_bytes(part).numpy().data)
    return found.hexdigest()


def expected(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """What the model's parameters must be, by hand: rows one above the other where they are fused."""
    found = {}
    names = list(state)
    for whole, (first, *others) in _FUSED.items():
        for name in [name for name in names if f".{first}." in name]:
            parts = [name, *(name.replace(first, other) for other in others)]
            found[name.replace(first, whole)] = sha256(state[part] for part in parts)
            names = [each for each in names if each not in parts]
    return found | {name: sha256([state[name]]) for name in names}


def main(config: dict[str, Any]) -> None:
    """Push new weights, measure an empty pause and one flat copy in turns, and report each round."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # any import of it raises from here on
    _leave_first_core()
    torch.set_num_threads(1)
    bench = RelayClient(Path(config["folder"]) / "bench.sock")
    engine = TimedClient(Path(config["folder"]) / "engine.sock", bench)
    manifest = Manifest(tuple(TensorMeta(n, d, tuple(s)) for n, d, s in config["tensors"]))
    generator = torch.Generator().manual_seed(1)
    state = {
        each.name: (0.02 * torch.randn(each.shape, generator=generator)).to(DTYPES[each.dtype])
        for each in manifest.tensors
    }
    with WeightSync.connect(
        engine, backend=config["backend"], source=state, staging="device"
    ) as sync:
        for version in range(1, config["rounds"] + 1):
            for tensor in state.values():
                tensor.neg_()  # stands for a training step: no bit pattern stays
            bench.call("report", _round(sync, engine, bench, state, version))
    engine.close()
    bench.close()


def _round(
    sync: WeightSync,
    engine: TimedClient,
    bench: RelayClient,
    state: dict[str, torch.Tensor],
    version: int,
) -> dict[str, Any]:
    bench.call("tokens", _SETTLED)
    before = time.monotonic()
    threading.Event().wait(_BEFORE_S)
    began = time.monotonic()
    result = sync.push(version)
    paused = engine.paused
    empty = []
    with serving(sync._trainer):  # as it does while a push pauses the engine
        for _ in range(_EMPTY):
            bench.call("tokens", _SETTLED)
            engine.pause()
            engine.resume()
            empty.append(engine.paused)
        bench.call("tokens", _SETTLED)
        engine.pause()
        copy_s = bench.call("flat_copy", result.nbytes)
    found = bench.call("sha256")
    engine.resume()
    (stages,) = result.engines.values()
    return {
        "before": (before, began),
        "during": (began, paused[0]),
        "paused": paused,
        "empty": empty,
        "copy_s": copy_s,
        "nbytes": result.nbytes,
        "stages": asdict(stages),
        "right": found == expected(state),
    }


def _leave_first_core() -> None:
    """To the engine's worker."""
    others = os.sched_getaffinity(0) - {0}
    if others:
        os.sched_setaffinity(0, others)


if __name__ == "__main__":
    from vllm_wt.errors import WeightTransferError

    try:
        main(json.loads(sys.argv[1]))
    except WeightTransferError as failure:
        sys.exit(f"trainer: {failure}")
