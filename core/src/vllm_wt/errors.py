"""Every error of vllm-wt: typed, with the facts a reader needs, and able to cross vLLM as text.

vLLM hands a worker's exception to its caller as text only, so the text ends in one line
``WT-E<nn> {json}`` from which :func:`from_text` rebuilds the exception on the other side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "Aborted",
    "BackendUnavailable",
    "CorruptTransfer",
    "EngineError",
    "InvalidInfo",
    "LoadError",
    "ManifestMismatch",
    "NotPaused",
    "OutOfBounds",
    "PeerDead",
    "PluginError",
    "Revoked",
    "Superseded",
    "Timeout",
    "TornModel",
    "TransportError",
    "UnsupportedVllm",
    "WeightTransferError",
    "WrongOrder",
    "from_text",
    "shown",
    "to_text",
]

_LINE = re.compile(r"WT-(E\d\d) (?=\{)")
_FACTS = ("where", "expected", "got", "cure", "backend", "engine")
_MAX_FACT = 600


def shown(value: object) -> str:
    """What a caller gave, for an error; its ``repr`` may fail, or be of any length."""
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_FACT else f"{text[: _MAX_FACT - 3]}..."


class WeightTransferError(Exception):
    """Base of all errors. ``what`` is a sentence; the other facts are optional.

    Args:
        what: What went wrong.
        where: Phase, function, tensor, rank or address it happened at.
        expected: What would have been right.
        got: What was there instead.
        cure: What the reader can do about it.
        backend: Name of the backend concerned.
        engine: Which of the engines of a session, and its address.
        ranks: For an error of a worker group, each failing rank's own reason.
    """

    code: ClassVar[str] = "E00"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        cure: str | None = None,
        backend: str | None = None,
        engine: str | None = None,
        ranks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.cure = cure
        self.backend = backend
        self.engine = engine
        self.ranks: dict[int, str] = dict(ranks or {})

    def __str__(self) -> str:
        parts = [self.what.rstrip(".") + "."]
        if self.backend:
            parts.append(f"Backend: {self.backend}.")
        if self.engine:
            parts.append(f"Engine: {self.engine}.")
        if self.where:
            parts.append(f"Where: {self.where}.")
        if self.expected is not None:
            parts.append(f"Expected: {self.expected}.")
        if self.got is not None:
            parts.append(f"Got: {self.got}.")
        if self.ranks:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in self.ranks.items())
            parts.append(f"Ranks: {reasons}.")
        if self.cure:
            parts.append(f"Cure: {self.cure.rstrip('.')}.")
        return " ".join(parts)

    def facts(self) -> dict[str, Any]:
        """The error as JSON-safe data, each text cut to a bounded length."""
        facts: dict[str, Any] = {"code": self.code, "what": _cut(self.what)}
        for name in _FACTS:
            value = getattr(self, name)
            if value is not None:
                facts[name] = _cut(str(value))
        if self.ranks:
            facts["ranks"] = {str(rank): _cut(text) for rank, text in self.ranks.items()}
        return facts


class InvalidInfo(WeightTransferError, ValueError):
    """A field of an init or update info is unknown, missing, of the wrong type or out of range."""

    code = "E01"


class WrongOrder(WeightTransferError, RuntimeError):
    """A phase was called in a state that does not allow it."""

    code = "E02"


class ManifestMismatch(WeightTransferError, ValueError):
    """Names, order, shapes or dtypes differ between trainer, manifest and model."""

    code = "E03"


class PeerDead(WeightTransferError, ConnectionError):
    """The process at the other end has gone."""

    code = "E04"


class Timeout(WeightTransferError, TimeoutError):
    """A wait reached its deadline."""

    code = "E05"


class Revoked(WeightTransferError):
    """A handle of memory that its owner no longer exposes."""

    code = "E06"


class OutOfBounds(WeightTransferError, ValueError):
    """A copy reaches outside the memory that was exposed or registered."""

    code = "E07"


class CorruptTransfer(WeightTransferError):
    """What arrived is not what was announced."""

    code = "E08"


class TornModel(WeightTransferError):
    """The model holds a mix of old and new weights: do not generate before a full update."""

    code = "E09"


class TransportError(WeightTransferError):
    """The fabric failed in a way that has no class of its own."""

    code = "E10"


class BackendUnavailable(WeightTransferError, LookupError):
    """No such backend is installed, or its code cannot be imported."""

    code = "E11"


class PluginError(WeightTransferError):
    """A backend package breaks the contract: duplicate name, wrong hook, missing class."""

    code = "E12"


class EngineError(WeightTransferError):
    """vLLM itself failed; ``got`` holds its words."""

    code = "E13"


class UnsupportedVllm(WeightTransferError):
    """The installed vLLM is outside the supported releases, or lacks something we build on."""

    code = "E14"


class Aborted(WeightTransferError):
    """The round was closed before it was sealed; the weights are as they were."""

    code = "E15"


class LoadError(WeightTransferError):
    """The model's own loader refused the weights before any layer was touched."""

    code = "E16"


class Superseded(WrongOrder):
    """Another trainer has connected to the engine since; its round is not touched."""

    code = "E17"


class NotPaused(WrongOrder):
    """This engine loads while it receives (streamed), and so must not generate meanwhile."""

    code = "E18"


def _subclasses(cls: type[WeightTransferError]) -> dict[str, type[WeightTransferError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_subclasses(sub))
    return found


def from_facts(facts: Mapping[str, Any]) -> WeightTransferError:
    """Rebuild an error from :meth:`WeightTransferError.facts`; unknown codes give the base class."""
    cls = _subclasses(WeightTransferError).get(str(facts.get("code")), WeightTransferError)
    ranks = facts.get("ranks")
    return cls(
        str(facts.get("what", "unknown error")),
        **{name: str(facts[name]) for name in _FACTS if facts.get(name) is not None},
        ranks={int(r): str(t) for r, t in ranks.items()} if isinstance(ranks, dict) else None,
    )


def to_text(error: WeightTransferError) -> str:
    """The text that crosses vLLM: the message for people, then the line for :func:`from_text`."""
    return f"{error}\nWT-{error.code} {json.dumps(error.facts())}"


def from_text(text: str, *, where: str) -> WeightTransferError:
    """Rebuild the typed error from an exception text that crossed vLLM.

    Args:
        text: Whatever text the engine gave; wrappers before and after our line are ignored.
        where: The call that failed, for texts without our line.

    Returns:
        The typed error, or :class:`EngineError` with the engine's words.
    """
    for match in reversed(list(_LINE.finditer(text))):  # ours is last; a quoted one comes before it
        try:
            facts, _ = json.JSONDecoder().raw_decode(text, match.end())
            return from_facts(facts)
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return EngineError(
        "The engine failed",
        where=where,
        got=text.strip()[:4000],
        cure="see what the engine says; its log has more",
    )
