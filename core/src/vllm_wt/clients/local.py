"""An engine in this process."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


class LocalClient:
    """A ``vllm.LLM``. Its calls block, and come back in the order they were made.

    Args:
        llm: An engine started with ``weight_transfer_config``.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        # vLLM 0.27 added the version; before, only the session keeps it.
        self._takes_version = bool(inspect.signature(llm.finish_weight_update).parameters)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None and self._takes_version:
            self._llm.finish_weight_update(weight_version)
        else:
            self._llm.finish_weight_update()

    def world_size(self) -> int:
        """Workers that receive weights: tensor times pipeline parallel."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size)
