"""Notices when anything is unpickled in this process. Import-light: it comes before all others."""

from __future__ import annotations

import _pickle
import pickle
import traceback
from typing import Any

seen: list[str] = []
"""Where something was unpickled, as text."""


def watch() -> None:
    """From now on, by all that is imported later: a module may take the names with it."""
    for module in (pickle, _pickle):
        for name in ("load", "loads"):
            watch_function(module, name)
    for module, name in ((pickle, "Unpickler"), (pickle, "_Unpickler"), (_pickle, "Unpickler")):
        setattr(module, name, _watched_class(getattr(module, name)))


def watch_function(owner: Any, name: str) -> None:
    """Watch one more function that unpickles."""
    original = getattr(owner, name)

    def watched(*args: Any, **keywords: Any) -> Any:
        _note()
        return original(*args, **keywords)

    setattr(owner, name, watched)


def _watched_class(original: Any) -> Any:
    """A class again: libraries derive from it."""

    class Watched(original):  # type: ignore[misc]
        def load(self) -> Any:
            _note()
            return super().load()

    Watched.__name__ = Watched.__qualname__ = original.__name__
    return Watched


def _note() -> None:
    seen.append("".join(traceback.format_stack(limit=6)[:-2]))
