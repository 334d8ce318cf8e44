"""The engines of an installed backend, of any kind."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm_wt import native, registry
from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine, WorkerContext
from vllm_wt.errors import BackendUnavailable, InvalidInfo, shown
from vllm_wt.pull import PullEngine, PullTrainer, TeamTrainer
from vllm_wt.source import WeightSource
from vllm_wt.spec import AUTO, BackendSpec, Kind
from vllm_wt.team import Team
from vllm_wt.transport import Transport


def worker_engine(context: WorkerContext) -> WeightTransferEngine[Any, Any]:
    """The worker's side of the backend that ``context`` names; its kind is not NATIVE.

    Raises:
        BackendUnavailable, PluginError: It is not installed, or broken.
    """
    spec = registry.default().get(context.backend).spec
    if spec.kind is Kind.TRANSPORT:
        default = registry.resolve(str(spec.transport), backend=spec.name)
        return PullEngine(context, default, choose=partial(transport_named, spec))
    engine: WeightTransferEngine[Any, Any] = registry.resolve(str(spec.worker), backend=spec.name)(
        context
    )
    return engine


def transport_chosen(spec: BackendSpec, option: Any = None) -> tuple[str, type[Transport]]:
    """The Transport of a backend of kind TRANSPORT, and its name for workers: empty for the default.

    Args:
        spec: Of the backend.
        option: A name of ``spec.transports``; ``"auto"`` for the first of them whose libraries are
            installed; None for the default.

    Raises:
        InvalidInfo: There is no such Transport.
        BackendUnavailable, PluginError: It cannot be used here.
    """
    if option is None:
        return "", transport_named(spec, "")
    if option != AUTO or not spec.transports:
        return option, transport_named(spec, option)
    reasons = []
    for name in spec.transports:
        try:
            return name, transport_named(spec, name)
        except BackendUnavailable as error:
            reasons.append(f"{name}: {error.got or error.what}; {error.cure}")
    raise BackendUnavailable(
        f"Backend {spec.name!r} has no transport whose libraries are installed",
        backend=spec.name,
        where="transport",
        expected=f"those of {' or '.join(spec.transports)}",
        got="none",
        cure="; or ".join(reasons),
    )


def transport_named(spec: BackendSpec, name: Any) -> type[Transport]:
    """The Transport of a name that a peer has sent, or a caller: the default for an empty one.

    Raises:
        InvalidInfo: There is no such Transport.
        BackendUnavailable, PluginError: It cannot be used here.
    """
    if not isinstance(name, str) or (name and name not in spec.transports):
        raise InvalidInfo(
            f"Backend {spec.name!r} has no such transport",
            backend=spec.name,
            where="transport",
            expected=" or ".join(map(repr, spec.transports)) or "none: it has one alone",
            got=shown(name),
            cure="leave it out for the default; install the same release on both sides",
        )
    path = spec.transports[name] if name else str(spec.transport)
    cls: type[Transport] = registry.resolve(path, backend=spec.name)
    if spec.transports and hasattr(cls, "require"):
        cls.require()
    return cls


def native_engine_cls(backend: str) -> type[native.WeightTransferEngine[Any, Any]] | None:
    """The engine in vLLM's own form of an installed backend; None where it has none.

    Raises:
        BackendUnavailable, PluginError: It is not installed, or broken.
    """
    spec = registry.default().get(backend).spec
    if spec.native is None:
        return None
    cls: type[native.WeightTransferEngine[Any, Any]] = registry.resolve(
        spec.native, backend=spec.name
    )
    return cls


def trainer_engine(
    backend: str, source: WeightSource, *, team: Any = None, **options: Any
) -> TrainerWeightTransferEngine:
    """The trainer's side of an installed backend.

    Args:
        backend: Its name.
        source: The weights.
        team: The trainer's ranks, a `Team`, where each has memory to be read, or sends a part.
        options: Of the backend; ``transport``, where it has several: see `transport_chosen`.

    Raises:
        InvalidInfo: ``backend`` is no name, an option is unknown to it, or it has no such ranks, or
            no side that `WeightSync` could drive.
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
    if spec.kind is Kind.NATIVE:
        raise InvalidInfo(
            f"Backend {spec.name!r} has no side for WeightSync: its engine is in vLLM's own form",
            backend=spec.name,
            where="connect",
            expected="a backend of kind transport or engine",
            got="one of kind native",
            cure="call the vLLM engine's init_weight_transfer_engine, start_weight_update, "
            "update_weights and finish_weight_update yourself, with the backend's own infos",
        )
    if spec.kind is Kind.TRANSPORT:
        name, transport_cls = transport_chosen(spec, options.pop("transport", None))
        options |= {"backend": spec.name, "transport_cls": transport_cls, "transport": name}
        if isinstance(team, Team):
            return TeamTrainer(source, team=team, **options)
        return PullTrainer(source, **options if team is None else {**options, "team": team})
    trainer_cls: type[TrainerWeightTransferEngine] = registry.resolve(
        str(spec.trainer), backend=spec.name
    )
    if team is None:
        return trainer_cls(source, backend=spec.name, **options)
    make = trainer_cls.of_team()
    if make is None or not isinstance(team, Team):
        raise InvalidInfo(
            f"Backend {spec.name!r} does not read from several ranks of a trainer",
            where="group",
            expected="a backend of kind transport, or one whose trainer's side has of_team()",
            got=f"one of kind {spec.kind.value}",
            cure="connect on one rank, without group",
        )
    return make(source, team=team, backend=spec.name, **options)
