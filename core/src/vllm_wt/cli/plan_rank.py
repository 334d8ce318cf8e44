"""What one rank of an engine takes of a checkpoint, for ``vllm-wt plan``."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_wt.errors import InvalidInfo

if TYPE_CHECKING:
    from vllm_wt.bridge.tiers import Tiers
    from vllm_wt.loading.plan import LoadPlan
    from vllm_wt.manifest import Manifest

_FIRST = 3
"""Modules and tensors that are named where only their number matters."""


@dataclass(frozen=True)
class RankLoad:
    """What a rank does to load some tensors.

    Args:
        plan: Which elements of which tensor go where.
        tiers: How each module gets them.
        architecture: Class of the model.
        device: Kind of the device where an engine of this installation has its weights.
        build_s: Seconds that building the model took.
        record_s: Seconds that following its loaders took.
    """

    plan: LoadPlan
    tiers: Tiers
    architecture: str
    device: str
    build_s: float
    record_s: float


def rehearsed(arguments: argparse.Namespace, rank: int, manifest: Manifest) -> RankLoad:
    """Build one rank's model, and follow its loaders.

    Args:
        arguments: Of the command: the model, and the engine's.
        rank: Of the engine's tensor-parallel group.
        manifest: The tensors that it is to load.

    Raises:
        InvalidInfo: These arguments do not go together.
        EngineError: vLLM cannot build the model.
        LoadError: The model does not take these tensors.
    """
    from vllm_wt.bridge.planning import rehearse
    from vllm_wt.bridge.skeleton import skeleton

    began = time.perf_counter()
    settings: dict[str, Any] = {}
    if is_expert_parallel(arguments):
        # Which experts a rank has is in a tensor, and its loaders look it up there.
        settings = {"enable_expert_parallel": True, "memory": True}
    with skeleton(
        arguments.model, tp=arguments.tp, rank=rank, quantization=arguments.quantization, **settings
    ) as built:
        ready = time.perf_counter()
        rehearsal = rehearse(built.model, built.vllm_config, built.device, manifest)
        return RankLoad(
            rehearsal.plan,
            rehearsal.tiers,
            type(built.model).__name__,
            built.device.type,
            ready - began,
            time.perf_counter() - ready,
        )


def is_expert_parallel(arguments: argparse.Namespace) -> bool:
    """Whether each rank has some of the experts, all of each, instead of a part of every one.

    Raises:
        InvalidInfo: The size that was given is not that of the engine.
    """
    if arguments.ep is None or arguments.ep is True or arguments.ep == arguments.tp:
        return arguments.ep is not None
    raise InvalidInfo(
        f"There is no expert parallel {arguments.ep} at tensor parallel {arguments.tp}",
        where="ep",
        expected=f"{arguments.tp}, or no number",
        got=arguments.ep,
        cure="vLLM divides the experts among all ranks of an engine, as many as --tp says: give --ep "
        "without a number",
    )


def planned(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The plan of one rank as JSON-safe data, and in lines for people."""
    began = time.perf_counter()
    from vllm_wt.bridge.skeleton import require_rank
    from vllm_wt.sources.checkpoint import manifest_of

    rank = arguments.rank or 0
    require_rank(arguments.tp, rank)
    is_expert_parallel(arguments)
    manifest = manifest_of(arguments.model)
    release = vllm_release()

    from vllm_wt.loading.slices import sliced
    from vllm_wt.transport import TransportProperties

    manifest_s = time.perf_counter() - began
    load = rehearsed(arguments, rank, manifest)
    slices = sliced(load.plan, TransportProperties().gaps[load.device])
    read = {name: runs for name, runs in slices.runs.items() if runs}
    found = {
        **engine_of(arguments, load, release),
        "rank": rank,
        "tensors_needed": len(read),
        "unused": list(load.plan.unused),
        "rank_bytes": load.plan.nbytes,
        "runs": sum(map(len, read.values())),
        "read_bytes": slices.nbytes,
        **modules_of(load.tiers),
        "seconds": {
            "manifest": round(manifest_s, 3),
            "build": round(load.build_s, 3),
            "record": round(load.record_s, 3),
        },
    }
    return found, list(_lines(found))


def vllm_release() -> str:
    """Imports vLLM."""
    from vllm import __version__ as release

    return str(release)


def engine_of(arguments: argparse.Namespace, load: RankLoad, release: str) -> dict[str, Any]:
    """What is the same for all ranks of an engine."""
    from vllm_wt.sources.checkpoint import has_weights

    return {
        "model": str(arguments.model),
        "architecture": load.architecture,
        "tp": arguments.tp,
        "expert_parallel": is_expert_parallel(arguments),
        "quantization": arguments.quantization,
        "vllm": release,
        "platform": load.device,
        "names_from": "safetensors" if has_weights(arguments.model) else "config",
        "tensors": len(load.plan.manifest),
        "model_bytes": load.plan.manifest.nbytes,
    }


def modules_of(tiers: Tiers) -> dict[str, Any]:
    """How a rank's modules are loaded."""
    return {
        "whole": tiers.whole,
        "direct": {"modules": len(tiers.direct), "first": list(tiers.direct[:_FIRST])},
        "layerwise": _grouped(tiers.layerwise.items()),
        "fallback": _grouped((name, "; ".join(why)) for name, why in tiers.fallback.items()),
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
        f"{found['architecture']}, rank {found['rank']} of {parallel_text(found)}, "
        f"as vLLM {found['vllm']} has it on {found['platform']}"
    )
    yield from source_of_names(found)
    share = found["rank_bytes"] / max(found["model_bytes"], 1)
    yield f"tensors    {found['tensors']}, {found['tensors_needed']} needed on this rank"
    yield (
        f"bytes      {size_text(found['model_bytes'])}, {size_text(found['rank_bytes'])} needed on "
        f"this rank ({share:.1%})"
    )
    yield (
        f"reads      {found['runs']}, of {size_text(found['read_bytes'])}: what lies between short "
        "pieces is read too"
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


def parallel_text(found: dict[str, Any]) -> str:
    """How an engine divides its model."""
    return f"tensor parallel {found['tp']}" + (
        " with expert parallelism" if found["expert_parallel"] else ""
    )


def source_of_names(found: dict[str, Any]) -> Iterator[str]:
    """A line where the names are not those of files."""
    if found["names_from"] == "config":
        yield "(the folder has no weights: names and shapes are those that transformers would save)"


def _named(names: list[str], count: int) -> str:
    """Some names in brackets, and whether there are more."""
    if not names:
        return ""
    shown = ", ".join(name or "the model itself" for name in names)
    return f" ({shown}{', ...' if count > len(names) else ''})"


def size_text(nbytes: float) -> str:
    """Bytes, in a unit that suits them."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
