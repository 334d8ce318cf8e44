"""The same step with several engines, at the same time: a fleet takes as long as its slowest engine."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from functools import partial

from vllm_wt.errors import WeightTransferError
from vllm_wt.link import EngineLink

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Seconds after which an interrupt is noticed that came just before a wait."""
_LET_END_S = 2.0
"""Seconds that calls under way have to end after an interrupt, so that none comes upon what is done
then; they take milliseconds, but for those of an engine that is stuck."""


def each(links: Sequence[EngineLink], step: Callable[[EngineLink], object]) -> None:
    """Take a step with every link, whatever becomes of the others.

    Raises:
        WeightTransferError: Of the first link, in their order, with which it failed; of others it is
            logged. All have ended by then.
    """
    tried = zip(links, _errors(links, step), strict=True)
    failed = [(link, error) for link, error in tried if error is not None]
    for link, error in failed[1:]:
        logger.warning("vllm-wt: %s failed, too: %s", link.title, error)
    if failed:
        raise failed[0][1]


def _errors(
    links: Sequence[EngineLink], step: Callable[[EngineLink], object]
) -> list[WeightTransferError | None]:
    if len(links) == 1:
        return [_error_of(step, links[0])]
    try:
        futures = [link.caller(partial(_error_of, step, link)) for link in links]
        while concurrent.futures.wait(futures, timeout=_LOOK_S).not_done:
            pass
    except BaseException:
        last = [future for link in links if (future := link.caller.last) is not None]
        concurrent.futures.wait(last, timeout=_LET_END_S)
        raise
    return [future.result() for future in futures]


def _error_of(step: Callable[[EngineLink], object], link: EngineLink) -> WeightTransferError | None:
    try:
        step(link)
    except WeightTransferError as error:
        return error
    return None
