"""Engines in vLLM's own form: no session and no manifest, driven by vLLM's four calls alone.

::

    from vllm_wt.native import (
        WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    )

A class of this form is named by ``BackendSpec.native``. One instance lives in every vLLM worker, and
`vllm_wt.native_round` drives it. WHO runs each step:

=====================  ================================  =======================================
step                   run by                            may block
=====================  ================================  =======================================
init_transfer_engine   a thread of core's                until ``init_info.deadline_s``, or 60 s
start_weight_update    the worker's main thread          no
receive_weights        a thread of core's                until ``update_info.deadline_s``, or 300 s
abort_weight_update    the worker's main thread          no
finish_weight_update   the worker's main thread          no
shutdown               the worker's main thread          briefly
trainer_send_weights   the trainer, whenever it likes    as it likes
=====================  ================================  =======================================

An engine may raise on any rank at any step: core makes the ranks agree on the outcome. It never
touches the model; ``load_weights`` copies what it is given, and the copies are loaded when the ranks
have agreed to, in ``finish``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import ConfigDict

from vllm_wt.engine import WorkerContext
from vllm_wt.info import STRICT
from vllm_wt.native_factory import WeightTransferEngineFactory

__all__ = [
    "LoadWeights",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "WorkerContext",
]

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], None]
"""Takes full tensors under their checkpoint names, in one or many calls. Their memory is the engine's
again when it returns."""


@dataclass
class WeightTransferInitInfo:
    """Base of what ``init_transfer_engine`` is given. Subclasses are plain dataclasses of JSON-safe
    fields; one called ``deadline_s`` bounds the step."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass
class WeightTransferUpdateInfo:
    """Base of what ``receive_weights`` is given; otherwise as `WeightTransferInitInfo`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


I = TypeVar("I", bound=WeightTransferInitInfo)  # noqa: E741
U = TypeVar("U", bound=WeightTransferUpdateInfo)


class WeightTransferEngine(ABC, Generic[I, U]):
    """Worker side of a backend in vLLM's own form.

    A subclass may have a ``trainer_send_weights(iterator, trainer_args)``, class or static method, for
    its trainer to call.

    Args:
        context: Where it lives.
    """

    init_info_cls: type[I]
    update_info_cls: type[U]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse info classes that core would not decode strictly."""
        super().__init_subclass__(**kwargs)
        bases = {
            "init_info_cls": WeightTransferInitInfo,
            "update_info_cls": WeightTransferUpdateInfo,
        }
        for name, base in bases.items():
            given = getattr(cls, name, base)
            if not (isinstance(given, type) and issubclass(given, base)):
                raise TypeError(f"{cls.__name__}.{name} must derive from {base.__name__}")

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @abstractmethod
    def init_transfer_engine(self, init_info: I) -> None:
        """Connect to the trainer. Before a second call, there is a ``shutdown``."""

    def start_weight_update(self) -> None:
        """A round begins."""

    @abstractmethod
    def receive_weights(self, update_info: U, load_weights: LoadWeights) -> None:
        """Receive what one ``update_weights`` call announces, and hand it to ``load_weights``.

        A round may have several; together they bring every tensor of the model, each once.
        """

    def finish_weight_update(self) -> None:
        """What was received in this round is in the model now."""

    def abort_weight_update(self, reason: str) -> None:
        """The round, or the connecting, is given up: let go of what it holds.

        A call that is still running must be made to raise soon: this comes from another thread.
        """

    def shutdown(self) -> None:
        """Release everything; idempotent, and ``init_transfer_engine`` works afterwards."""
