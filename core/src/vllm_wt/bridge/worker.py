"""The engine class that vLLM's workers see: vLLM's base class over core's round.

``engine_<name>`` is made on first access, one subclass for each discovered backend.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine as VllmEngine

from vllm_wt import registry
from vllm_wt.backends import native_engine_cls
from vllm_wt.bridge import compat, gate
from vllm_wt.bridge.loader import ModelWeights
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import WeightTransferError, to_text
from vllm_wt.forms import Forms, Round


class RoundError(RuntimeError):
    """What leaves our code inside vLLM: text that `vllm_wt.errors.from_text` reads back."""


class WorkerEngine(VllmEngine):
    """One vLLM worker's engine. Data is parsed inside the round, so that no rank raises alone."""

    backend: str
    supports_draft_weight_update = False
    init_info_cls = dict
    update_info_cls = dict

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        gate.open_for(WorkerEngine)
        ranks = compat.worker_ranks(vllm_config.parallel_config)
        context = WorkerContext(
            backend=self.backend,
            device=device,
            rank=ranks.rank,
            size=ranks.size,
            replica=vllm_config.parallel_config.data_parallel_index,
        )
        self.forms = Forms(
            context,
            ModelWeights(model, vllm_config, device),
            ranks,
            lambda: compat.device_context(device),
        )

    @property
    def round(self) -> Round:
        """Of the trainer that is connected."""
        return self.forms.current

    def parse_init_info(self, init_dict: Any) -> Any:
        return init_dict

    def parse_update_info(self, update_dict: Any) -> Any:
        return update_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        self._guarded(self.forms.init, init_info)

    def start_weight_update(self) -> None:
        self._guarded(self.round.start)

    def update_weights(self, update_info: Any) -> None:
        # vLLM's own method synchronizes the device at every call; ours needs that at commit only.
        self._guarded(self.round.update, update_info)

    def receive_weights(self, update_info: Any) -> None:
        self._guarded(self.round.update, update_info)

    def finish_weight_update(self) -> None:
        self._guarded(self.round.finish)

    def run_round(self, worker: Any, update_info: Any) -> dict[str, float] | None:
        """A round from start to finish, through vLLM's own methods of this worker; see `gate`.

        Returns:
            Seconds, by stage; None where another rank has failed, which the highest one raises.
        """
        began = time.perf_counter()
        worker.start_weight_update()
        if not self.round.has_agreed:
            return None
        worker.update_weights(update_info)
        if not self.round.has_agreed:
            return None
        sealed = time.perf_counter()
        worker.finish_weight_update()
        if not self.round.has_agreed:
            return None
        return {"wire": sealed - began, "load": time.perf_counter() - sealed}

    def report(self) -> dict[str, Any]:
        """What this worker says of itself; see `gate`."""
        return self.round.report()

    def refuse_draft_update(self) -> None:
        """Instead of a draft update that vLLM would refuse on every rank; see `gate`."""
        self._guarded(
            self.round.refuse,
            "start_draft_weight_update",
            "push the target model's weights; draft models are not supported yet",
        )

    def shutdown(self) -> None:
        self.round.shutdown()

    @classmethod
    def trainer_send_weights(cls, iterator: Any, trainer_args: Any) -> Any:
        """That of the backend's engine in vLLM's own form. Abstract in vLLM up to 0.27."""
        send = getattr(native_engine_cls(cls.backend), "trainer_send_weights", None)
        if send is None:
            raise TypeError(
                f"backend {cls.backend!r} has no trainer_send_weights; use vllm_wt.WeightSync in the "
                "trainer, or what the backend's own package has for it"
            )
        return send(iterator, trainer_args)

    @staticmethod
    def _guarded(step: Any, *args: Any) -> None:
        try:
            step(*args)
        except WeightTransferError as error:
            raise RoundError(to_text(error)) from error


def __getattr__(name: str) -> type[WorkerEngine]:
    backend = name.removeprefix("engine_")
    if backend == name or backend not in registry.default().backends:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = type(f"WorkerEngine_{backend}", (WorkerEngine,), {"backend": backend})
    globals()[name] = cls
    return cls
