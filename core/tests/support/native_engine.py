"""An engine in vLLM's own form that makes its weights itself, and a model that is a dictionary."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_wt.errors import Aborted, LoadError
from vllm_wt.loading.apply import Weights
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.manifest import Manifest
from vllm_wt.native import (
    LoadWeights,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WorkerContext,
)

SIZES = {"a": 2, "b": 3}
"""The model's tensors."""


@dataclass
class MyInitInfo(WeightTransferInitInfo):
    scale: float
    fail_on: int | None = None
    deadline_s: float = 30.0


@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    value: float
    shapes: dict[str, list[int]] = field(default_factory=dict)
    fail_on: int | None = None
    stall_on: int | None = None
    deadline_s: float | None = 30.0


class MyEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        device = torch.device("cpu")
        super().__init__(WorkerContext(backend="mine", device=device, rank=rank, size=size))
        self.calls: list[str] = []
        self.go = threading.Event()
        """Lets a call that stalls go on."""
        self.hears_aborts = True
        self.load_weights: LoadWeights | None = None

    def init_transfer_engine(self, init_info: MyInitInfo) -> None:
        self.calls.append("init")
        self._fail(init_info.fail_on)
        self.scale = init_info.scale

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.go.clear()

    def receive_weights(self, update_info: MyUpdateInfo, load_weights: LoadWeights) -> None:
        self.calls.append("receive")
        self.load_weights = load_weights
        buffer = torch.empty(max(SIZES.values()))
        for name in update_info.names:
            part = buffer[: SIZES[name]]
            part.fill_(update_info.value * self.scale)
            load_weights([(name, part.reshape(update_info.shapes.get(name, [-1])))])
        buffer.fill_(float("nan"))
        self._fail(update_info.fail_on)
        if update_info.stall_on == self.context.rank:
            self.stall()

    def stall(self) -> None:
        self.go.wait(60)
        if self.hears_aborts:
            raise Aborted("given up")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def abort_weight_update(self, reason: str) -> None:
        self.calls.append("abort")
        if self.hears_aborts:
            self.go.set()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def _fail(self, rank: int | None) -> None:
        if rank == self.context.rank:
            raise OSError("cable")


class MyModel:
    """A `ModelLoader` that knows its plan, and what it needs."""

    def __init__(self) -> None:
        self.weights: dict[str, list[float]] = {}
        self.rehearsed: LoadPlan | None = None
        self.used: list[LoadPlan] = []
        self.fail: str | None = None
        self.asleep: Exception | None = None

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        if missing := set(SIZES) - {tensor.name for tensor in manifest.tensors}:
            raise LoadError(
                f"{sorted(missing)} would keep their old values",
                cure="send every tensor of the checkpoint",
            )
        if self.rehearsed is None or self.rehearsed.manifest != manifest:
            self.rehearsed = LoadPlan.of_whole(manifest, "a dictionary")
        return self.rehearsed

    def use(self, plan: LoadPlan, batches: Sequence[Sequence[str]] | None = None) -> None:
        assert batches is None
        self.used.append(plan)

    def check(self, weights: Weights) -> None:
        assert [name for name, _ in weights] == [t.name for t in self.used[-1].manifest.tensors]

    def require_awake(self) -> None:
        if self.asleep is not None:
            raise self.asleep

    def apply(self, weights: Weights) -> None:
        if self.fail is not None:
            raise ValueError(self.fail)
        self.weights = {name: tensor.flatten().tolist() for name, tensor in weights}

    def look(self) -> None:
        raise AssertionError("nothing of it is streamed")

    def apply_batch(self, number: int, weights: Weights, *, looked: bool = False) -> None:
        raise AssertionError("nothing of it is streamed")


def holds(value: float) -> dict[str, list[float]]:
    """What the model has after a round of this value."""
    return {name: [value] * size for name, size in SIZES.items()}
