"""The file of checks that a backend is known to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_wt.testing.conformance.report import all_checks


def read_known_failures(path: Path) -> dict[str, str]:
    """Reasons by check, from lines ``name  # reason``; empty lines and comments are ignored.

    Raises:
        pytest.UsageError: A name that is no check, twice, or without a reason.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--wt-known-failures: {error}") from None
    known: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        name, _, reason = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        wrong = None
        if name not in all_checks():
            wrong = f"{name!r} is no check of the kit"
        elif name in known:
            wrong = f"{name!r} is there twice"
        elif not reason:
            wrong = f"{name!r} has no reason; write one after a #"
        if wrong is not None:
            raise pytest.UsageError(f"{path}:{number}: {wrong}")
        known[name] = reason
    return known
