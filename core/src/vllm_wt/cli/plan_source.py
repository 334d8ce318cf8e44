"""``vllm-wt plan --source``: what all ranks of some engines take from the ranks of a trainer.

Core builds the engines' ranks one after another; how the trainer holds the model, and who sends what
to whom, is told by the backend that would transfer it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_wt import registry
from vllm_wt.cli import plan_rank
from vllm_wt.cli.plan_rank import RankLoad, size_text
from vllm_wt.errors import BackendUnavailable, InvalidInfo

if TYPE_CHECKING:
    from vllm_wt.loading.plan import LoadPlan
    from vllm_wt.manifest import Manifest

_LINK = 50.0
"""GB/s of each rank's link where none is given: what a port of 400 Gbit/s has."""


@dataclass(frozen=True)
class Request:
    """What a backend is asked.

    Args:
        source: How the trainer holds the model: what the command line says.
        manifest: The tensors of the checkpoint.
        rehearse: What each rank of one engine does to load the tensors that the trainer sends, by
            rank. They are the checkpoint's, unless the source says others. Each rank takes seconds, at
            the time when it is asked for.
        replicas: How many engines there are, all alike.
        links: Speeds of a rank's link in each direction, in GB/s.
        plot: File for a picture.
    """

    source: str
    manifest: Manifest
    rehearse: Callable[[Manifest], Iterator[RankLoad]]
    replicas: int
    links: tuple[float, ...]
    plot: Path | None


class SourcePlanner(Protocol):
    """See ``BackendSpec.planner``. A plain function."""

    def __call__(self, request: Request) -> tuple[dict[str, Any], list[str]]:
        """The plan of all ranks, each of which it asks for, as JSON-safe data and in lines for people.

        Raises:
            InvalidInfo: There is no such source, or the model cannot be held so.
            ManifestMismatch: It lacks what the engines need.
        """


def planned(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The plan of all ranks as JSON-safe data, and in lines for people.

    Raises:
        BackendUnavailable: The backend is not installed, or plans nothing.
        PluginError: It has no such function.
    """
    began = time.perf_counter()
    from vllm_wt.bridge.skeleton import require_rank
    from vllm_wt.sources.checkpoint import manifest_of

    _require_all_ranks(arguments)
    require_rank(arguments.tp, 0)
    plan_rank.is_expert_parallel(arguments)
    planner = _planner(arguments.backend)
    checkpoint = manifest_of(arguments.model)
    ranks: list[dict[str, Any]] = []
    seconds = {"build": 0.0, "record": 0.0}
    engine: dict[str, Any] = {}

    def rehearse(manifest: Manifest) -> Iterator[RankLoad]:
        release = plan_rank.vllm_release()
        for rank in range(arguments.tp):
            load = plan_rank.rehearsed(arguments, rank, manifest)
            engine.update(plan_rank.engine_of(arguments, load, release))
            if manifest != checkpoint:
                engine["names_from"] = "source"
            ranks.append(_of_rank(rank, load))
            seconds["build"] += load.build_s
            seconds["record"] += load.record_s
            yield load

    replicas = arguments.replicas or 1
    found, lines = planner(
        Request(
            arguments.source,
            checkpoint,
            rehearse,
            replicas,
            tuple(arguments.links or [_LINK]),
            None if arguments.plot is None else Path(arguments.plot),
        )
    )
    seconds["total"] = time.perf_counter() - began
    head = (
        f"{engine['architecture']} at {plan_rank.parallel_text(engine)}, as vLLM {engine['vllm']} has "
        f"it on {engine['platform']}"
    )
    whole = {
        **engine,
        "replicas": replicas,
        "ranks": ranks,
        "source": found,
        "seconds": {part: round(each, 3) for part, each in seconds.items()},
    }
    return whole, [head, *plan_rank.source_of_names(engine), *lines, *_module_lines(ranks)]


def _require_all_ranks(arguments: argparse.Namespace) -> None:
    if arguments.rank is not None:
        raise InvalidInfo(
            "One rank was named, and with a source all of them are planned",
            where="rank",
            expected="no --rank with --source",
            got=arguments.rank,
            cure="leave out --rank; or --source, for the plan of this rank alone",
        )


def _planner(backend: str) -> SourcePlanner:
    path = registry.default().get(backend).spec.planner
    if path is None:
        raise BackendUnavailable(
            f"Backend {backend!r} plans no transfer from the shards of a trainer",
            backend=backend,
            where="backend",
            expected="a backend with a planner, such as sharded",
            cure="choose another backend",
        )
    planner: SourcePlanner = registry.resolve(path, backend=backend)
    return planner


def _of_rank(rank: int, load: RankLoad) -> dict[str, Any]:
    plan = load.plan
    full = _full_tensors(plan)
    return {
        "rank": rank,
        "tensors_needed": sum(1 for t in plan.manifest.tensors if plan.needed(t.name).runs),
        "rank_bytes": plan.nbytes,
        "full": {"tensors": len(full), "bytes": sum(plan.source(name).nbytes for name in full)},
        **plan_rank.modules_of(load.tiers),
    }


def _full_tensors(plan: LoadPlan) -> set[str]:
    """Those that a module's own loader wants whole, so that they are put together of their parts."""
    return {name for fallback in plan.fallbacks.values() for name in fallback.sources}


def _module_lines(ranks: list[dict[str, Any]]) -> Iterator[str]:
    full = [rank["full"] for rank in ranks]
    if any(each["tensors"] for each in full):
        tensors, nbytes = (max(each[key] for each in full) for key in ("tensors", "bytes"))
        yield (
            f"full       {tensors} tensors of {size_text(nbytes)} have to be put together on each "
            "worker, for the model's own loaders"
        )
    else:
        yield "full       no tensor has to be put together for the model's own loaders"
    reasons = {rank["whole"] for rank in ranks} - {None}
    if reasons:
        yield f"the whole model goes through vLLM's reload: {'; '.join(sorted(reasons))}"
        return
    tiers = (f"{tier} {_range(ranks, tier)}" for tier in ("direct", "layerwise", "fallback"))
    yield f"modules    {', '.join(tiers)} on each worker; --rank without --source says why"


def _range(ranks: list[dict[str, Any]], tier: str) -> str:
    counts = [rank[tier]["modules"] for rank in ranks]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"
