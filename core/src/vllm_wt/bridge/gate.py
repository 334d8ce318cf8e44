"""Leaves the order of calls to our round, where vLLM's worker would refuse them itself.

The worker keeps a flag of its own and refuses a call out of turn on every rank at once, after which
`collective_rpc` returns each later call the reply of an earlier one, for good (0.25 to 0.33, at
tensor parallel 2 or more). No engine can prevent that from inside: two trainers of one engine, or one
that was stopped and goes on, are enough. So, on workers whose engine is ours, the flag is set to what
the call asks for, and the round refuses it instead: the ranks agree, and only the highest one raises.

And the worker class gets two methods of ours, names that `collective_rpc` can call; they change nothing
of vLLM's own. `vllm_wt_report`, since vLLM's four return nothing: it never raises, which would put the
replies out of step, too, and a report that fails says so. And `vllm_wt_round`, three of the four in one
call, where each call would take as long as a small model's copy: the round sees to who raises.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from vllm_wt.errors import WeightTransferError, shown, to_text
from vllm_wt.methods import REPORT, ROUND

_FLAG = {
    "start_weight_update": False,
    "update_weights": True,
    "finish_weight_update": True,
    "shutdown_weight_transfer_engine": False,
}
"""Methods of the worker, and the value of its flag with which they go through."""
_DRAFT = "start_draft_weight_update"
_OPENED = "_vllm_wt_opened"


def open_for(engine_cls: type[Any]) -> None:
    """Wrap the methods of vLLM's worker class once; other engines' workers go on as they were."""
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, _OPENED, False):
        return
    for name, flag in _FLAG.items():
        if hasattr(Worker, name):  # the last one came with 0.32
            setattr(Worker, name, _opened(getattr(Worker, name), flag, engine_cls))
    if hasattr(Worker, _DRAFT):  # since 0.26
        setattr(Worker, _DRAFT, _refused(getattr(Worker, _DRAFT), engine_cls))
    setattr(Worker, REPORT, _reporting(engine_cls))
    setattr(Worker, ROUND, _whole(engine_cls))
    setattr(Worker, _OPENED, True)


def _opened(original: Callable[..., Any], flag: bool, engine_cls: type[Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.weight_transfer_engine, engine_cls):
            self._weight_update_active = flag
            # vLLM 0.29 and later would pick this rank's entry of a list, which may be too short on
            # some ranks; as anything else than a list it reaches the round, and is refused there.
            args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
            kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
        return original(self, *args, **kwargs)

    return call


def _reporting(engine_cls: type[Any]) -> Callable[[Any], dict[str, Any] | None]:
    def report(self: Any) -> dict[str, Any] | None:
        try:
            engine = getattr(self, "weight_transfer_engine", None)
            if not isinstance(engine, engine_cls):
                return None
            # Through JSON here: what cannot be sent would fail later, beyond our reach.
            told: dict[str, Any] = json.loads(json.dumps(engine.report(), allow_nan=False))
        except WeightTransferError as error:
            return {"error": to_text(error)}
        except Exception as error:
            return {"error": shown(error)}
        return told

    return report


def _whole(engine_cls: type[Any]) -> Callable[..., dict[str, float] | None]:
    def whole(self: Any, update_info: Any) -> dict[str, float] | None:
        engine = getattr(self, "weight_transfer_engine", None)
        return engine.run_round(self, update_info) if isinstance(engine, engine_cls) else None

    return whole


def _refused(original: Callable[..., Any], engine_cls: type[Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.weight_transfer_engine, engine_cls):
            return original(self, *args, **kwargs)
        return self.weight_transfer_engine.refuse_draft_update()

    return call
