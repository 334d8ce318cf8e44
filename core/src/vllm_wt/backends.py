"""The two engines of an installed backend, of either kind."""

from __future__ import annotations

from typing import Any

from vllm_wt import registry
from vllm_wt.clients.limits import shown
from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine, WorkerContext
from vllm_wt.errors import InvalidInfo
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.source import WeightSource
from vllm_wt.spec import Kind


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
    backend: str, source: WeightSource, **options: Any
) -> TrainerWeightTransferEngine:
    """The trainer's side of an installed backend.

    Raises:
        InvalidInfo: ``backend`` is no name, or an option is unknown to it.
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
        return PullTrainer(source, backend=spec.name, transport_cls=transport_cls, **options)
    engine: TrainerWeightTransferEngine = registry.resolve(str(spec.trainer), backend=spec.name)(
        source, backend=spec.name, **options
    )
    return engine
