"""A worker's process: core's round over the worker's side of a backend, and a model of the kit's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from vllm_wt.backends import worker_engine
from vllm_wt.engine import LoadWeights, WorkerContext
from vllm_wt.info import InitInfo, UpdateInfo
from vllm_wt.loading.apply import Kept
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.staging import Staging
from vllm_wt.manifest import Manifest
from vllm_wt.ranks import GroupRanks, Ranks, SingleRank
from vllm_wt.round import WorkerRound
from vllm_wt.testing import unpickling
from vllm_wt.testing.conformance.content import digest
from vllm_wt.testing.conformance.resources import resources

_GROUP_S = 30


class _Model:
    """Keeps what it is loaded with."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        """Any tensors will do, in full."""
        return LoadPlan.of_whole(manifest, "no model")

    def use(self, plan: LoadPlan, batches: Sequence[Sequence[str]] | None = None) -> None:
        """There is nothing to prepare."""

    def check(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Any values will do."""

    def require_awake(self) -> None:
        """It never sleeps."""

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def look(self) -> None:
        """It stays where it is."""

    def apply_batch(
        self, number: int, weights: Iterable[tuple[str, torch.Tensor]], *, looked: bool = False
    ) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in weights}


class Worker:
    """One worker of an engine, called as vLLM calls it.

    Args:
        backend: Which.
        device: Of the model.
        rank: Of this worker.
        size: Workers of the engine.
        meeting: A file through which they find each other.
    """

    def __init__(self, backend: str, device: str, rank: int, size: int, meeting: str) -> None:
        self._context = WorkerContext(
            backend=backend, device=torch.device(device), rank=rank, size=size
        )
        self._meeting = meeting
        self._model = _Model()
        self.given: list[str] = []
        """Names, in the order in which the backend has given the tensors in this round."""

    def join(self) -> None:
        """Meet the other workers; the engine is made after that, as in vLLM."""
        ranks: Ranks = SingleRank()
        if self._context.size > 1:
            dist.init_process_group(
                "gloo",
                store=FileStore(self._meeting, self._context.size),
                rank=self._context.rank,
                world_size=self._context.size,
                timeout=timedelta(seconds=_GROUP_S),
            )
            ranks = GroupRanks(dist.group.WORLD)  # type: ignore[arg-type]
        self._engine = worker_engine(self._context)
        self._receive = self._engine.receive_weights
        self._engine.receive_weights = self._receive_noted  # type: ignore[method-assign, assignment]
        self._round = WorkerRound(self._engine, self._model, ranks)

    def _receive_noted(self, info: Any, load_weights: LoadWeights) -> None:
        self.given = []

        def noted(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            received = weights if isinstance(weights, Kept) else list(weights)
            self.given.extend(name for name, _ in received)
            load_weights(received)

        self._receive(info, noted)

    # -- as vLLM calls it ----------------------------------------------------------------------

    def init(self, info: dict[str, Any]) -> None:
        self._round.init(info)

    def start(self) -> None:
        self._round.start()

    def update(self, info: dict[str, Any]) -> None:
        self._round.update(info)

    def finish(self) -> None:
        self._round.finish()

    def shutdown(self) -> None:
        self._round.shutdown()

    # -- the engine by itself ------------------------------------------------------------------

    def shutdown_engine(self) -> None:
        self._engine.shutdown()

    def abort_engine(self) -> None:
        self._engine.abort_weight_update("the check wants it")

    def receive(
        self, init_info: dict[str, Any], update_info: dict[str, Any]
    ) -> dict[str, str] | None:
        """A receive of the engine's alone, on this thread; what it has given, or None for a part."""
        backend = self._context.backend
        init = self._engine.init_info_cls.from_wire(init_info, backend=backend)
        update = self._engine.update_info_cls.from_wire(update_info, backend=backend)
        staging = Staging(init.manifest())
        self._engine.receive_weights(update, staging)
        if len(self.given) < len(init.tensors):
            return None
        return {name: digest(tensor) for name, tensor in staging.weights()}

    def info_classes(self) -> dict[str, dict[str, Any]]:
        """Of init and update: whether each is as it must be, and its fields without a default."""
        classes = {
            "init": (self._engine.init_info_cls, InitInfo),
            "update": (self._engine.update_info_cls, UpdateInfo),
        }
        return {
            what: {
                "good": issubclass(cls, base)
                and dataclasses.is_dataclass(cls)
                and cls.__dataclass_params__.frozen,  # type: ignore[attr-defined]
                "required": [
                    field.name
                    for field in dataclasses.fields(cls)
                    if field.default is dataclasses.MISSING
                    and field.default_factory is dataclasses.MISSING
                ],
                "own": [
                    field.name
                    for field in dataclasses.fields(cls)
                    if field.name not in {inherited.name for inherited in dataclasses.fields(base)}
                ],
            }
            for what, (cls, base) in classes.items()
        }

    def receiving(self) -> bool:
        """Whether a receive of the round is under way."""
        receive = self._round._receive
        return receive is not None and receive.running

    # -- what it has ---------------------------------------------------------------------------

    def weights(self) -> dict[str, str]:
        """Digests of what was loaded last."""
        return {name: digest(tensor) for name, tensor in self._model.weights.items()}

    def names(self) -> list[str]:
        """What the backend has given in the last round, in order."""
        return self.given

    def version(self) -> int | None:
        return self._round.version

    def resources(self) -> dict[str, int]:
        return resources()

    def unpickled(self) -> list[str]:
        return unpickling.seen
