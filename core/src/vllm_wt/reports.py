"""What a worker says of itself: the version it holds, and where it receives the next one.

vLLM's four methods return nothing, so it is asked through ``collective_rpc``, by a name that
`vllm_wt.bridge.gate` adds to vLLM's worker. The answer is another process's word and is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from vllm_wt import registry
from vllm_wt.bridge.register import names_in_vllm
from vllm_wt.errors import CorruptTransfer, from_text

Fact: TypeAlias = str | int | float | bool
_MOST_WORKERS = 1 << 14
_MOST_FACTS = 64
_MOST_CHARACTERS = 4096
_CURE = "run the same release of vllm-wt, and of the backend, on both sides"


@dataclass(frozen=True)
class WorkerReport:
    """What one worker says of itself.

    Args:
        rank: In the engine's worker group.
        version: What it has committed last in its trainer's session; None for nothing.
        torn: It mixes weights of two versions, and must not generate before a full push.
        state: Where it is within a round; ``"idle"`` between two.
        streams: A rank of this engine loads what it receives at once, so it is paused meanwhile.
        facts: What its backend says of itself, by name. One over a Transport says ``owner`` (the rank
            of the trainer that it reads), ``staging`` (where it receives), ``why``, ``arena_nbytes``
            (memory held for it) and ``needed_nbytes`` (what an update takes of that).
    """

    rank: int
    version: int | None
    torn: bool
    state: str
    streams: bool
    facts: dict[str, Fact] = field(default_factory=dict, hash=False)

    @classmethod
    def decode(cls, told: object, *, where: str) -> WorkerReport:
        """The report in what a worker has answered.

        Args:
            told: The answer.
            where: Names it in errors.

        Raises:
            CorruptTransfer: It is no report.
            WeightTransferError: The worker says that it could not make one.
        """
        match told:
            case {"error": str(text), **others} if not others:
                raise from_text(text, where=where)
            case {
                "rank": rank,
                "version": version,
                "torn": bool(torn),
                "state": str(state),
                "streams": bool(streams),
                **facts,
            }:
                pass
            case _:
                raise _no_report(where, "rank, version, torn, state, streams", _shown(told))
        if not _is_count(rank):
            raise _no_report(f"{where}.rank", "a whole number, 0 or more", _shown(rank))
        if version is not None and not _is_count(version):
            raise _no_report(f"{where}.version", "a whole number or null", _shown(version))
        if len(state) > _MOST_CHARACTERS:
            raise _no_report(f"{where}.state", "a word", _shown(state))
        if len(facts) > _MOST_FACTS:
            raise _no_report(where, f"{_MOST_FACTS} facts at most", len(facts))
        checked: dict[str, Fact] = {}
        for name, value in facts.items():
            if not isinstance(name, str) or len(name) > _MOST_CHARACTERS or not _is_fact(value):
                expected = "names of texts, finite numbers and truth values"
                raise _no_report(where, expected, f"{_shown(name)}: {_shown(value)}")
            checked[name] = value
        return cls(rank, version, torn, state, streams, checked)


def report_list(told: object, *, where: str) -> list[dict[str, Any]] | None:
    """What the workers of an engine have answered, one after another; None if they tell nothing.

    Workers answer null whose engine is none of ours.

    Raises:
        CorruptTransfer: It is no list of objects.
    """
    if told is None:
        return None
    expected = f"a list of objects, {_MOST_WORKERS} at most"
    if not isinstance(told, list):
        raise _no_report(where, expected, type(told).__name__)
    if len(told) > _MOST_WORKERS:
        raise _no_report(where, expected, f"a list of {len(told)}")
    if all(one is None for one in told):
        return None
    for index, one in enumerate(told):
        if not isinstance(one, dict):
            raise _no_report(f"{where}[{index}]", "an object", type(one).__name__)
    return told


def decoded(told: object, *, where: str) -> tuple[WorkerReport, ...]:
    """The reports of an engine's workers; none if they tell nothing.

    Raises:
        CorruptTransfer: They have not the form of reports.
        WeightTransferError: A worker says that it could not make one.
    """
    return tuple(
        WorkerReport.decode(one, where=f"{where}[{index}]")
        for index, one in enumerate(report_list(told, where=where) or ())
    )


def can_report(configured_backend: str | None) -> bool:
    """Whether workers with this backend of vLLM's configuration have our method.

    Others must not be asked: a method that is missing raises on every rank at once, after which
    ``collective_rpc`` is out of step for good (see `vllm_wt.bridge.gate`).
    """
    return any(
        configured_backend in names_in_vllm(backend) for backend in registry.default().backends
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_fact(value: object) -> TypeGuard[Fact]:
    if isinstance(value, str):
        return len(value) <= _MOST_CHARACTERS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and -(2**63) <= value < 2**63  # bool is one


def _shown(value: object) -> str:
    plain = value is None or isinstance(value, (str, int, float))
    try:
        return repr(value)[:200] if plain else type(value).__name__
    except ValueError:  # Python writes no whole numbers of thousands of digits
        return "a very large number"


def _no_report(where: str, expected: str, got: object) -> CorruptTransfer:
    return CorruptTransfer(
        "A worker's report of itself has a wrong form",
        where=where,
        expected=expected,
        got=got,
        cure=_CURE,
    )
