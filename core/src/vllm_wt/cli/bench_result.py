"""What the benchmarks have in common: their arguments, and the JSON object that each prints last."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any


def positive(text: str) -> int:
    """An argument of which there must be one at least, for argparse."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def machine() -> dict[str, Any]:
    """What a figure depends on, whatever is measured."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def report(result: dict[str, Any], summary: str, *, json_only: bool) -> int:
    """Print a result; the exit code, 1 when a bound was missed.

    Args:
        result: Has ``name``, ``value``, ``baseline``, ``unit``, ``ratio``, ``bound``, ``ok``,
            ``samples`` and ``details``. What is held against a bound is held as it is printed.
        summary: It in words, for people.
        json_only: Whether to leave that out.
    """
    if not json_only:
        print(summary)
    print(json.dumps(result))
    return 0 if result["ok"] else 1
