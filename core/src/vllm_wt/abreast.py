"""The same step with several engines, at the same time: a fleet takes as long as its slowest engine."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from functools import partial

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Timeout, WeightTransferError
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
    failed = failures(links, step)
    for link, error in failed[1:]:
        logger.warning("vllm-wt: %s failed, too: %s", link.title, error)
    if failed:
        raise failed[0][1]


def failures(
    links: Sequence[EngineLink],
    step: Callable[[EngineLink], object],
    until: Deadline | None = None,
) -> list[tuple[EngineLink, WeightTransferError]]:
    """Take a step with every link; the links with which it failed, in their order, and why.

    Args:
        links: Which.
        step: What to do with each.
        until: Whoever has not answered by then has failed, by a Timeout; its call goes on. Without it,
            all calls have ended when this returns.
    """
    if len(links) == 1 and until is None:
        tried = [error_of(step, links[0])]
        return [(link, error) for link, error in zip(links, tried, strict=True) if error]
    try:
        futures = [link.caller(partial(error_of, step, link)) for link in links]
        while concurrent.futures.wait(
            futures, timeout=_LOOK_S if until is None else min(_LOOK_S, until.remaining())
        ).not_done:
            if until is not None and until.expired:
                break
    except BaseException:
        last = [future for link in links if (future := link.caller.last) is not None]
        concurrent.futures.wait(last, timeout=_LET_END_S)
        raise
    found = []
    for link, future in zip(links, futures, strict=True):
        error = future.result() if future.done() else unanswered(link)
        if error is not None:
            found.append((link, error))
    return found


def unanswered(link: EngineLink) -> Timeout:
    """The error of an engine that has been called and does not answer."""
    return Timeout(
        "The engine does not answer",
        engine=link.title,
        cure="see whether it is stopped or stuck; restart it and connect it again",
    )


def error_of(step: Callable[[EngineLink], object], link: EngineLink) -> WeightTransferError | None:
    """That of a step; None where it has gone well."""
    try:
        step(link)
    except WeightTransferError as error:
        return error
    return None
