"""The two engines of an installed backend, of either kind."""

from __future__ import annotations

from typing import Any

from vllm_wt import registry
from vllm_wt.clients.limits import shown
from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine, WorkerContext
from vllm_wt.errors import InvalidInfo
from vllm_wt.pull import PullEngine, PullTrainer, TeamTrainer
from vllm_wt.source import WeightSource
from vllm_wt.spec import Kind
from vllm_wt.team import Team


def worker_engine(context: WorkerContext) -> WeightTransferEngine[Any, Any]:
    """The worker's side of the backend that ``context`` names.

    Raises:
        BackendUnavailable, PluginError: It is not installed, or broken.
    """
    spec = registry.default().get(context.backend).spec
    if spec.kind is Kind.TRANSPORT:
        return PullEngine(context, registry.resolve(str(spec.transport), backend=spec.name))
    engine: WeightTransferEngine[Any, Any] = registry.resolve(str(spec.worker), backend=spec.name)(
        context
    )
    return engine


def trainer_engine(
    backend: str, source: WeightSource, *, team: Any = None, **options: Any
) -> TrainerWeightTransferEngine:
    """The trainer's side of an installed backend.

    Args:
        backend: Its name.
        source: The weights.
        team: The trainer's ranks, a `Team`, where each has memory of its own to be read.
        options: Of the backend.

    Raises:
        InvalidInfo: ``backend`` is no name, an option is unknown to it, or it has no such ranks.
        BackendUnavailable, PluginError: It is not installed, or broken.
    """
    if not isinstance(backend, str):
        raise InvalidInfo(
            "A backend is given by its name",
            where="backend",
            expected=f"one of {sorted(registry.default().backends)}",
            got=shown(backend),
            cure='WeightSync.connect(..., backend="rdma"), say; `vllm-wt list` shows all',
        )
    spec = registry.default().get(backend).spec
    if spec.kind is Kind.TRANSPORT:
        transport_cls = registry.resolve(str(spec.transport), backend=spec.name)
        options |= {"backend": spec.name, "transport_cls": transport_cls}
        if isinstance(team, Team):
            return TeamTrainer(source, team=team, **options)
        return PullTrainer(source, **options if team is None else {**options, "team": team})
    if team is not None:
        raise InvalidInfo(
            f"Backend {spec.name!r} does not read from several ranks of a trainer",
            where="group",
            expected="a backend of kind transport",
            got=f"one of kind {spec.kind.value}",
            cure="connect on one rank, without group",
        )
    engine: TrainerWeightTransferEngine = registry.resolve(str(spec.trainer), backend=spec.name)(
        source, backend=spec.name, **options
    )
    return engine
