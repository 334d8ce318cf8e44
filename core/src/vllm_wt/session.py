"""WeightSync: the one object a trainer needs to keep vLLM engines on its current weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from vllm_wt import registry
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.delivery import EngineLink, Stages
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import InvalidInfo, WeightTransferError, WrongOrder
from vllm_wt.pull import PullTrainer
from vllm_wt.source import WeightSource, as_source
from vllm_wt.spec import Kind


@dataclass(frozen=True)
class PushResult:
    """What one push did.

    Args:
        version: Version that every engine has now.
        nbytes: Payload bytes of a full update.
        tensors: Number of tensors.
        gather_s: Seconds until the source's values were readable.
        total_s: Seconds of the whole push.
        engines: Stage times, by engine name.
    """

    version: int
    nbytes: int
    tensors: int
    gather_s: float
    total_s: float
    engines: dict[str, Stages]


@dataclass(frozen=True)
class EngineStatus:
    """What is known of one engine: ``torn`` engines must not generate before a full push."""

    name: str
    version: int | None
    torn: bool


class WeightSync:
    """Pushes a source's weights into connected engines, version by version.

    Use :meth:`connect`. Every method raises errors of `vllm_wt.errors` only. Not thread-safe.
    """

    def __init__(
        self, trainer: TrainerWeightTransferEngine, source: WeightSource, links: list[EngineLink]
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._links = links
        self._versions: dict[str, int | None] = {link.name: None for link in links}
        self._closed = False

    @classmethod
    def connect(
        cls,
        engines: Any,
        *,
        backend: str,
        source: Any,
        deadline_s: float = INIT_S,
        **options: Any,
    ) -> Self:
        """Connect to engines.

        Args:
            engines: A client, an ``LLM``, or a sequence of them.
            backend: Name of an installed backend; the engines must run with the same.
            source: A `WeightSource`, a ``torch.nn.Module`` or a mapping of names to tensors.
            deadline_s: Seconds for the whole of it.
            options: Options of the backend.

        Raises:
            BackendUnavailable: No such backend here.
            WeightTransferError: What an engine or the fabric refused, typed.
        """
        deadline = Deadline(deadline_s)
        weights = as_source(source)
        clients = list(engines) if isinstance(engines, Sequence) else [engines]
        if not clients:
            raise InvalidInfo("There are no engines to connect to", where="engines")
        trainer = trainer_engine(backend, weights, **options)
        try:
            links = [
                EngineLink(_as_client(client), trainer, f"engine{index}")
                for index, client in enumerate(clients)
            ]
            for link in links:
                link.connect(deadline)
        except BaseException:
            trainer.shutdown()
            raise
        return cls(trainer, weights, links)

    def push(self, version: int, *, deadline_s: float = ROUND_S) -> PushResult:
        """Put the source's current weights into every engine.

        Args:
            version: Larger than any version pushed before.
            deadline_s: Seconds for the whole of it.

        Raises:
            WeightTransferError: An engine could not take them. It still has its old weights, unless
                :meth:`status` calls it torn.
        """
        if self._closed:
            raise WrongOrder("push after close", cure="connect again")
        hooks = registry.default().hooks.hook
        deadline = Deadline(deadline_s)
        hooks.vllm_wt_round_started(version=version)
        began = time.perf_counter()
        try:
            self._trainer.publish(version, deadline)
            gathered = time.perf_counter()
            stages = {}
            for link in self._links:
                stages[link.name] = link.deliver(version, deadline)
                self._versions[link.name] = version
        except WeightTransferError as error:
            hooks.vllm_wt_round_failed(version=version, error=error)
            raise
        manifest = self._source.manifest()
        result = PushResult(
            version=version,
            nbytes=manifest.nbytes,
            tensors=len(manifest),
            gather_s=gathered - began,
            total_s=time.perf_counter() - began,
            engines=stages,
        )
        hooks.vllm_wt_round_finished(stats=result)
        return result

    def status(self) -> list[EngineStatus]:
        """What is known of each engine, in the order of :meth:`connect`."""
        return [
            EngineStatus(link.name, self._versions[link.name], link.torn) for link in self._links
        ]

    def close(self) -> None:
        """Release the trainer's side; the engines keep their weights. Idempotent."""
        self._closed = True
        self._trainer.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def trainer_engine(
    backend: str, source: WeightSource, **options: Any
) -> TrainerWeightTransferEngine:
    """The trainer's side of an installed backend."""
    spec = registry.default().get(backend).spec
    if spec.kind is Kind.TRANSPORT:
        transport_cls = registry.resolve(str(spec.transport), backend=spec.name)
        return PullTrainer(source, backend=spec.name, transport_cls=transport_cls, **options)
    engine: TrainerWeightTransferEngine = registry.resolve(str(spec.trainer), backend=spec.name)(
        source, backend=spec.name, **options
    )
    return engine


def _as_client(engine: Any) -> Any:
    if hasattr(engine, "llm_engine"):  # a vllm.LLM, recognised without importing vllm
        from vllm_wt.clients.local import LocalClient

        return LocalClient(engine)
    missing = [
        name
        for name in (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        )
        if not callable(getattr(engine, name, None))
    ]
    if missing:
        raise InvalidInfo(
            "This cannot be an engine",
            where="engines",
            expected="a vllm.LLM, or an object with vLLM's four weight-transfer methods",
            got=f"{type(engine).__name__} without {', '.join(missing)}",
        )
    return engine
