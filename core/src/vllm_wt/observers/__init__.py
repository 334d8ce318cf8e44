"""Who hears of the rounds of this process, and what it does with them.

An observer is any object with some of the hooks ``vllm_wt_round_started``, ``vllm_wt_round_finished``
and ``vllm_wt_round_failed`` (`vllm_wt.hookspecs`), marked by ``vllm_wt.hookimpl``. It is called on the
thread that pushes, so that it had better be quick; what goes wrong in it is logged.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_wt import registry
from vllm_wt.observers.log import RoundLog
from vllm_wt.observers.prometheus import RoundMetrics

__all__ = ["RoundLog", "RoundMetrics", "observe"]


def observe(observer: object) -> Callable[[], None]:
    """Have an observer hear of all rounds of this process from now on.

    Returns:
        To be called when it is to hear no more.
    """
    hooks = registry.default().hooks
    hooks.register(observer)

    def leave() -> None:
        if hooks.is_registered(observer):
            hooks.unregister(observer)

    return leave
