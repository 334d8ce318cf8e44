"""``vllm-wt bench fleet``: many readers of one publish against as many bare reads, and one that dies.

What is compared runs alternately between the same processes, a round of each in turns. Everything
competes for the host's cores, the bare reads too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_wt import registry
from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.errors import BackendUnavailable, InvalidInfo
from vllm_wt.spec import BackendSpec, Capability, Kind

if TYPE_CHECKING:
    from vllm_wt.cli.bench_fleet_processes import Fleet, Span

_BOUND = 1.15
"""The most times that all readers may take as long as bare reads, with digests and without."""
_RISE_BOUND = 0.2
"""The most by which the others may take longer when a reader dies."""
_MAIN = "digest"
"""The side whose ratio is the result's, and on which a reader dies: what a sync does by default."""
_UNDISTURBED = 3
"""Rounds before each one in which a reader dies, to compare it with."""
_DIES_AFTER = 0.5
_PROCESS_NBYTES = 400 << 20
"""Of a process with torch and a fabric."""


@dataclass
class Measured:
    """Seconds of rounds.

    Args:
        all_s: By side, and of bare reads, until the last reader has everything.
        undisturbed_s: Until the last of all but one has, in rounds in which that one lives.
        disturbed_s: The same in rounds in which it dies.
        deaths: Readers that have died of those that were to.
        checked: Whether all that was received was right, and nobody has told of more.
    """

    all_s: dict[str, list[float]] = field(default_factory=dict)
    undisturbed_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)
    deaths: int = 0
    checked: bool = True


def add_parser(names: Any) -> None:
    parser = names.add_parser("fleet", help="many readers of one trainer, and one that dies")
    parser.add_argument("--backend", default="rdma", help="default: %(default)s")
    parser.add_argument("--readers", type=_several, default=4, help="default: %(default)s")
    parser.add_argument("--gib", type=_size, default=1.0, help="payload (default: %(default)g)")
    parser.add_argument("--tensors", type=positive, default=300, help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=7, help="default: %(default)s")
    parser.add_argument("--deaths", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a bound is missed."""
    spec = registry.default().get(arguments.backend).spec
    _require_suitable(spec)
    from vllm_wt.cli.bench_fleet_processes import Fleet

    nbytes = int(arguments.gib * (1 << 30))
    _require_memory(arguments.readers, nbytes)
    with (
        tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder,
        Fleet(
            Path(folder),
            backend=spec.name,
            readers=arguments.readers,
            nbytes=nbytes,
            tensors=arguments.tensors,
        ) as fleet,
    ):
        fleet.start()
        measured = Measured()
        _measure_ratio(fleet, arguments.rounds, measured)
        for number in range(arguments.deaths):
            if number:
                fleet.replace(fleet.readers[-1])
            _measure_death(fleet, measured)
        measured.checked &= measured.deaths == arguments.deaths
    found = result(measured, arguments.readers, nbytes)
    found["details"] |= {"backend": spec.name, "tensors": arguments.tensors, **machine()}
    return report(found, _summary(found), json_only=arguments.json)


def result(measured: Measured, readers: int, nbytes: int) -> dict[str, Any]:
    """What is printed, without what it was measured on."""
    raw_s = measured.all_s["raw"]
    ratios = {
        side: round(statistics.median(a / b for a, b in zip(seconds, raw_s, strict=True)), 3)
        for side, seconds in measured.all_s.items()
        if side != "raw"
    }
    undisturbed, disturbed = map(statistics.median, (measured.undisturbed_s, measured.disturbed_s))
    rise = round(disturbed / undisturbed - 1, 3)
    return {
        "name": "fleet",
        "value": round(statistics.median(measured.all_s[_MAIN]), 4),
        "baseline": round(statistics.median(raw_s), 4),
        "unit": "s",
        "ratio": ratios[_MAIN],
        "bound": _BOUND,
        "ok": measured.checked and max(ratios.values()) <= _BOUND and rise <= _RISE_BOUND,
        "samples": {
            "ours_s": measured.all_s[_MAIN],
            "baseline_s": raw_s,
            "without_digests_s": measured.all_s["bytes"],
            "undisturbed_others_s": measured.undisturbed_s,
            "disturbed_others_s": measured.disturbed_s,
        },
        "details": {
            "readers": readers,
            "gib": round(nbytes / (1 << 30), 3),
            "ratio_without_digests": ratios["bytes"],
            "deaths": measured.deaths,
            "others_rise": rise,
            "others_rise_bound": _RISE_BOUND,
            "checked": measured.checked,
        },
    }


def _measure_ratio(fleet: Fleet, rounds: int, measured: Measured) -> None:
    from vllm_wt.cli.bench_owner import SIDES

    measured.all_s = {side: [] for side in (*SIDES, "raw")}
    for number in range(-1, rounds):  # one round to touch all memory
        for side in SIDES:
            spans = fleet.round(side, fleet.readers)
            measured.checked &= fleet.is_right(fleet.readers)
            if number >= 0:
                measured.all_s[side].append(_elapsed(spans))
        spans = fleet.raw()
        if number >= 0:
            measured.all_s["raw"].append(_elapsed(spans))


def _measure_death(fleet: Fleet, measured: Measured) -> None:
    """Rounds in which all live, one in which a reader dies, and one without it."""
    *others, dying = fleet.readers
    fleet.round(_MAIN, fleet.readers)  # one may be new
    for _ in range(_UNDISTURBED):
        spans = fleet.round(_MAIN, fleet.readers)
        measured.undisturbed_s.append(_elapsed(spans[:-1]))
    dying.call("die_after", _DIES_AFTER)
    spans = fleet.round(_MAIN, fleet.readers)
    measured.deaths += spans[-1] is None
    measured.disturbed_s.append(_elapsed(spans[:-1]))
    measured.checked &= fleet.is_right(others)
    fleet.round(_MAIN, others)
    measured.checked &= fleet.is_right(others)


def _elapsed(spans: Sequence[Span | None]) -> float:
    """From the first reader's begin to the last one's end."""
    lived = [span for span in spans if span is not None]
    return max(span.ended for span in lived) - min(span.began for span in lived)


def _require_suitable(spec: BackendSpec) -> None:
    transport: Any = None
    if spec.kind is Kind.TRANSPORT and spec.baseline is not None:
        transport = registry.resolve(str(spec.transport), backend=spec.name)
    if (
        transport is None
        or transport.properties.maps
        or Capability.MANY_READERS not in spec.capabilities
    ):
        raise BackendUnavailable(
            f"Backend {spec.name!r} has no reads by many that could be compared with bare ones",
            backend=spec.name,
            expected="a Transport that many readers read, with a baseline",
            cure="choose another backend: rdma, say",
        )


def _require_memory(readers: int, nbytes: int) -> None:
    """Or the kernel ends a process in the middle, not always one of ours."""
    from vllm_wt.testing.conformance.resources import memory_available

    # Of a reader two arenas and what is read bare; of the owner the weights and what is read bare.
    needed = (3 * readers + 2) * nbytes + (readers + 1) * _PROCESS_NBYTES
    free = memory_available()
    if needed > free:
        raise InvalidInfo(
            f"There is no memory for {readers} readers of so much",
            where="--gib",
            expected=f"{free / 1e9:.1f} GB at most",
            got=f"{needed / 1e9:.1f} GB for all processes",
            cure="give a smaller --gib, or fewer --readers",
        )


def _summary(found: dict[str, Any]) -> str:
    details = found["details"]
    return (
        f"{details['readers']} readers of {details['gib']:g} GiB: {found['value']:.2f} s, bare reads "
        f"{found['baseline']:.2f} s, ratio {found['ratio']:.2f}, without digests "
        f"{details['ratio_without_digests']:.2f} (at most {_BOUND}); the others' time when one dies: "
        f"{details['others_rise']:+.0%} (at most {_RISE_BOUND:+.0%}); "
        + ("what came is right" if details["checked"] else "what came is WRONG")
    )


def _several(text: str) -> int:
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("one dies, and another is to go on: at least 2")
    return number


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0.001 <= size <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.001 and 1024")
    return size
