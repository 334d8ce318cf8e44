"""What the tests of reported failures share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vllm_wt.engine import WorkerContext
from vllm_wt.errors import WeightTransferError, to_text
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.manifest import Manifest
from vllm_wt.pull import PullEngine
from vllm_wt.ranks import SingleRank
from vllm_wt.round import WorkerRound
from vllm_wt_rdma.transport import NixlTransport


class Weights:
    """Stands in for the model: it takes everything, and keeps a copy of what was committed."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.places: dict[str, int] = {}

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        return LoadPlan.of_whole(manifest, "no model")

    def use(self, plan: LoadPlan, batches: Any = None) -> None:
        return None

    def check(self, weights):
        return None

    def require_awake(self) -> None:
        return None

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = list(weights)
        self.places = {name: tensor.data_ptr() for name, tensor in weights}
        self.received = {name: tensor.clone() for name, tensor in weights}


class Worker:
    """The four methods of an engine with one worker; errors cross as text, as they do in vLLM."""

    def __init__(
        self,
        device: str = "cpu",
        transport_cls: type[Any] = NixlTransport,
        model: Any = None,
    ) -> None:
        context = WorkerContext(backend="rdma", device=torch.device(device), rank=0, size=1)
        self.model = Weights() if model is None else model
        self.engine = PullEngine(context, transport_cls)
        self.round = WorkerRound(self.engine, self.model, SingleRank())
        self.answers_false_for: str | None = None

    @property
    def received(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self.model.received
        return weights

    def _call(self, name: str, step: Any, *args: Any) -> Any:
        try:
            step(*args)
        except WeightTransferError as error:
            if name == self.answers_false_for:
                return False
            raise RuntimeError(f"Worker failed with error '{to_text(error)}'") from None
        return None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        return self._call("init", self.round.init, init_info)

    def start_weight_update(self) -> Any:
        return self._call("start", self.round.start)

    def update_weights(self, update_info: dict[str, Any]) -> Any:
        return self._call(update_info["op"], self.round.update, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> Any:
        return self._call("finish", self.round.finish)

    def world_size(self) -> int:
        return 1


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The values in order, by another way than the code under test goes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_arrived(worker: Worker, sent: dict[str, torch.Tensor]) -> None:
    """Every tensor is there, with its form and its bytes."""
    assert list(worker.received) == list(sent)
    for name, tensor in sent.items():
        got = worker.received[name]
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name
        assert bytes_of(got) == bytes_of(tensor), name


class Touches:
    """Its pickle touches a file as it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class TouchesLater:
    """The same by ``__setstate__``, which a list of allowed classes would not stop."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["path"]).touch()
