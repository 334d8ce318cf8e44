"""``vllm-wt plan --source``: who sends how much to whom, as workers will plan it at connect."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_wt.cli.plan_source import Request
from vllm_wt.loading.plan import GAP, LoadPlan
from vllm_wt.manifest import Manifest
from vllm_wt.transport import TransportProperties
from vllm_wt_sharded import plan_plot
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.link_reads import reads_of
from vllm_wt_sharded.needs import needs_of
from vllm_wt_sharded.plan_report import Links, Report
from vllm_wt_sharded.planner import lower_bounds, plan
from vllm_wt_sharded.specs import layout_of_spec


def plan_source(request: Request) -> tuple[dict[str, Any], list[str]]:
    """The plan of all workers as JSON-safe data, and in lines for people.

    As at connect, each worker plans for itself, with nothing known of the others; those of the same
    rank of several engines plan the same.

    Raises:
        InvalidInfo: There is no such source, the model cannot be held so, or no such picture made.
        ManifestMismatch: Nobody holds a part of what a worker needs.
        BackendUnavailable: A picture is wanted, and matplotlib is not installed.
    """
    if request.plot is not None:
        plan_plot.require_possible(request.plot)
    source = layout_of_spec(request.source, request.manifest.tensors)
    needs, columns = [], []
    for rank, load in enumerate(request.rehearse(Manifest(source.tensors))):
        needs.append(needs_of(load.plan, rank))
        gap = TransportProperties().gaps.get(load.device, GAP)
        columns.append(_taken(source, load.plan, needs[-1], gap))
    # Of several engines each takes the same, so the bound of one is in proportion.
    out_bound, in_bound = lower_bounds(source, Layout.joined(needs))
    needed, reads, read = (
        np.tile(np.stack(each, axis=1), request.replicas) for each in zip(*columns, strict=True)
    )
    report = Report(
        request.source,
        source,
        request.replicas,
        Links(needed, reads, read),
        out_bound * request.replicas,
        in_bound,
        request.links,
    )
    if request.plot is not None:
        plan_plot.draw(report, request.plot)
    return report.as_json(), list(report.lines())


def _taken(source: Layout, load: LoadPlan, needs: Layout, gap: int) -> tuple[Ints, Ints, Ints]:
    """(ranks,) each: bytes that a worker takes from each rank, its reads, and their bytes."""
    if not len(needs):
        nothing = np.zeros(source.ranks, dtype=np.int64)
        return nothing, nothing, nothing
    found = plan(source, needs)
    (worker,) = found.workers
    full = {name for fallback in load.fallbacks.values() for name in fallback.sources}
    reads, nbytes = reads_of(source, found.for_worker(worker), full=full, gap=gap)
    return found.bytes_out, reads, nbytes
