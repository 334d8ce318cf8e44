"""What the measurements of ``vllm-wt bench round`` come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_wt.cli.bench_result import machine
from vllm_wt.cli.bench_round_engine import Seen
from vllm_wt.cli.bench_round_sides import Setting, Side

BOUNDS = {
    ("8b", "bytes:none"): 15.0,
    ("8b", "digest:auto"): 8.0,
    ("1.7b", "bytes:none"): 25.0,
    ("1.7b", "digest:auto"): 12.0,
}
"""The least times that a round of ours is faster than one of vLLM's own."""

_SHOWN = 3
"""Tensors that are named of those that differ."""


@dataclass(frozen=True)
class Measured:
    """All of a run.

    Args:
        ours: By setting, the main one first.
        builtin: vLLM's own, by mode; empty where they were not measured.
        fresh: An engine that loaded the same content when it started; None where there was none.
        copy_rate: Bytes a second, read and written, of a flat copy in the trainer's process.
        nbytes: Of the model.
    """

    ours: Mapping[Setting, Side]
    builtin: Mapping[str, Side]
    fresh: Seen | None
    copy_rate: float
    nbytes: int


def result(measured: Measured, model: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The JSON object.

    Args:
        measured: What was.
        model: Its name in `bench_round_model.MODELS`.
        facts: What the figures depend on.
    """
    builtin_ms = {mode: _ms(side.seconds) for mode, side in measured.builtin.items()}
    better = min(builtin_ms, key=builtin_ms.__getitem__, default=None)
    baseline = None if better is None else builtin_ms[better]
    limit_ms = round(2 * measured.nbytes / measured.copy_rate * 1e3, 3)
    settings = {
        str(setting): _of_setting(side, baseline, BOUNDS.get((model, str(setting))), limit_ms)
        for setting, side in measured.ours.items()
    }
    differences = _differences(measured)
    # That sessions of ours agree with each other proves nothing.
    compared = bool(measured.builtin) or measured.fresh is not None
    checked = compared and not any(differences.values())
    main, side = next(iter(settings.values())), next(iter(measured.ours.values()))
    return {
        "name": "round",
        "value": main["round_ms"],
        "baseline": baseline,
        "unit": "ms",
        "ratio": main["ratio"],
        "bound": main["bound"],
        "ok": checked and main["within_bound"],
        "samples": {
            "ours_s": side.seconds,
            "baseline_s": [] if better is None else measured.builtin[better].seconds,
        },
        "details": {
            "megabytes": round(measured.nbytes / 1e6, 1),
            "checked": checked,
            "differences": differences,
            "builtin": {
                mode: {
                    "round_ms": builtin_ms[mode],
                    "round_hot_ms": _ms(side.hot),
                    **_memory(side),
                }
                for mode, side in measured.builtin.items()
            },
            "settings": settings,
            "limit_ms": limit_ms,
            "copy_tb_s": round(measured.copy_rate / 1e12, 3),
            "model": model,
            **facts,
            **machine(),
        },
    }


def _of_setting(
    side: Side, baseline: float | None, bound: float | None, limit_ms: float
) -> dict[str, Any]:
    round_ms = _ms(side.seconds)
    ratio = None if baseline is None else round(baseline / round_ms, 3)
    if ratio is None:
        bound = None
    kernel_ms = None if side.copy_s is None else round(side.copy_s * 1e3, 3)
    engines = [asdict(stages) for push in side.pushes for stages in push.engines.values()]
    return {
        "round_ms": round_ms,
        "round_hot_ms": _ms(side.hot),
        "ratio": ratio,
        "bound": bound,
        "within_bound": ratio is None or bound is None or ratio >= bound,
        "limit_share": round(limit_ms / round_ms, 3),
        "kernel_ms": kernel_ms,
        "kernel_limit_share": None if kernel_ms is None else round(limit_ms / kernel_ms, 3),
        "between_kernel_and_round_ms": None
        if kernel_ms is None
        else round(round_ms - kernel_ms, 3),
        "gather_ms": _ms(push.gather_s for push in side.pushes),
        "stages_ms": {stage: _ms(each[stage] for each in engines) for stage in engines[0]},
        "samples_s": side.seconds,
        **_memory(side),
    }


def _memory(side: Side) -> dict[str, Any]:
    """What the worker has needed beyond what it had before."""
    if side.memory is None:
        return {"extra_mb": None}
    before, after = side.memory
    return {
        "extra_mb": round((after["allocated_peak"] - before["allocated"]) / 1e6, 1),
        "memory": {"before": before, "after": after},
    }


def _differences(measured: Measured) -> dict[str, list[str]]:
    """In what engines differ from ours after the main setting, bit by bit: nothing, if all is right."""
    first, *others = measured.ours
    seen = {str(setting): measured.ours[setting].seen for setting in others}
    seen |= {f"builtin {mode}": side.seen for mode, side in measured.builtin.items()}
    if measured.fresh is not None:
        seen["fresh"] = measured.fresh
    return {name: _between(each, measured.ours[first].seen) for name, each in seen.items()}


def _between(one: Seen, other: Seen) -> list[str]:
    """Some of the tensors that differ, and whether what was generated does."""
    names = one.checksums.keys() | other.checksums.keys()
    found = [n for n in sorted(names) if one.checksums.get(n) != other.checksums.get(n)][:_SHOWN]
    return found + ([] if one.logprobs == other.logprobs else ["logprobs"])


def _ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
