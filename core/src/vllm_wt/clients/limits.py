"""What the clients of other processes share: how long a call may take, what an answer may be."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from vllm_wt.deadline import MAX_S
from vllm_wt.errors import CorruptTransfer, InvalidInfo, shown


def call_limit_s(info: object, *, default_s: float, slack_s: float) -> float:
    """Seconds that an init or update call may take.

    The worker keeps the ``deadline_s`` of the info itself, and reports a typed error then; the
    slack leaves it the time to.

    Args:
        info: The init or update info.
        default_s: In place of a ``deadline_s`` that is missing or out of range.
        slack_s: Seconds beyond it.
    """
    seconds: Any = info.get("deadline_s") if isinstance(info, Mapping) else None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    # A comparison with NaN is false.
    if not is_number or not 0 < seconds <= MAX_S:
        seconds = default_s
    return float(seconds) + slack_s


def require_seconds(name: str, value: Any) -> float:
    """A number of seconds above 0, checked.

    Raises:
        InvalidInfo: It is none.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= threading.TIMEOUT_MAX:
        raise InvalidInfo(
            f"The field {name!r} has a wrong value",
            where=name,
            expected="seconds, more than 0",
            got=shown(value),
            cure="leave it out for the default",
        )
    return float(value)


def parsed(data: bytes) -> Any:
    """The JSON in ``data``, or None, which is no answer of anything either."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return None


def worker_count(value: object, *, where: str) -> int:
    """A number of workers, checked.

    Raises:
        CorruptTransfer: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptTransfer(
            "The engine did not say how many workers it has",
            where=where,
            expected="a whole number, 1 or more",
            got=repr(value)[:200],
            cure="check that this is the address of a vLLM engine",
        )
    return value


def text_or_none(value: object, *, where: str) -> str | None:
    """A text that an engine may not have, checked.

    Raises:
        CorruptTransfer: It is none.
    """
    if value is not None and not isinstance(value, str):
        raise CorruptTransfer(
            "The engine's answer is no text",
            where=where,
            expected="a string or null",
            got=repr(value)[:200],
            cure="check that this is the address of a vLLM engine",
        )
    return value
