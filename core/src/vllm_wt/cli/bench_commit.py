"""``vllm-wt bench commit``: what the pause of a sync costs, against one copy of the same bytes.

The commit is the whole of it, as a worker runs it on a model of vLLM's whose weights are plain
parameters, as on a GPU: on a CPU that takes a switch that is there for tests.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_wt.cli.bench_model import save_config
from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.cli.plan import require_vllm, stdout_kept

_BOUND = 1.3
"""The most of the time of one flat copy that a commit may take."""


def add_parser(names: Any) -> None:
    commit = names.add_parser(
        "commit",
        help="loading into a live model against one flat copy, on a CPU",
        description="Loads into a model whose weights are plain parameters, as they are on a GPU. An "
        "engine on a CPU packs its weights: most of its modules go through vLLM's layerwise reload.",
    )
    commit.add_argument(
        "--megabytes", type=positive, default=400, help="about, and 156 or more (%(default)s)"
    )
    commit.add_argument("--rounds", type=positive, default=9, help="default: %(default)s")
    commit.add_argument("--json", action="store_true", help="nothing but the JSON object")
    commit.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when the commit takes longer than the bound, or is not exact.

    Raises:
        BackendUnavailable: vLLM is not installed.
        EngineError: vLLM fails with the model.
    """
    require_vllm("What is measured is a commit into a model of vLLM's")
    with tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder, stdout_kept():
        save_config(Path(folder), arguments.megabytes)
        measured = _measured(folder, arguments.rounds)
    commit_s, copy_s, nbytes = (measured.pop(key) for key in ("commit_s", "copy_s", "nbytes"))
    ratio = round(statistics.median(c / f for c, f in zip(commit_s, copy_s, strict=True)), 3)
    result = {
        "name": "commit",
        "value": round(statistics.median(commit_s) * 1e3, 3),
        "baseline": round(statistics.median(copy_s) * 1e3, 3),
        "unit": "ms",
        "ratio": ratio,
        "bound": _BOUND,
        "ok": ratio <= _BOUND and measured["checked"],
        "samples": {"ours_s": commit_s, "baseline_s": copy_s},
        "details": {"megabytes": round(nbytes / 1e6, 1), **measured, **machine()},
    }
    summary = (
        f"{nbytes / 1e6:.0f} MB in {measured['tensors']} tensors: commit {result['value']:.1f} ms, "
        f"one flat copy {result['baseline']:.1f} ms, ratio {ratio:.2f} (at most {_BOUND})"
    )
    return report(result, summary, json_only=arguments.json)


def _measured(folder: str, rounds: int) -> dict[str, Any]:
    """Seconds of both sides in turns, over the same received bytes."""
    import torch
    from vllm import __version__ as release
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    import vllm_wt.testing.unpacked  # noqa: F401
    from vllm_wt.bridge.loader import ModelWeights
    from vllm_wt.bridge.skeleton import skeleton
    from vllm_wt.packing import Layout, as_bytes
    from vllm_wt.sources.checkpoint import manifest_of

    torch.set_num_threads(1)  # as in a worker of vLLM's on a CPU
    device = torch.device("cpu")
    manifest = manifest_of(folder)
    layout = Layout(manifest)
    arena = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    flat = torch.ones_like(arena)
    weights = list(layout.views(arena))
    with skeleton(folder, memory=True) as built:
        config = built.vllm_config
        process_weights_after_loading(built.model, config.model_config, device)
        loader = ModelWeights(built.model, config, device)
        plan = loader.rehearse(manifest)
        loader.use(plan)
        loader.check(weights)
        commit_s, copy_s = [], []
        for number in range(-2, rounds):  # two rounds to touch all memory
            commit = _timed(lambda: loader.apply(weights))
            copy = _timed(lambda: flat.copy_(arena))
            if number >= 0:
                commit_s.append(commit)
                copy_s.append(copy)
        values = dict(weights)
        first = "model.layers.0.self_attn"
        query = values[f"{first}.q_proj.weight"]
        fused = built.model.get_parameter(f"{first}.qkv_proj.weight")
        exact = torch.equal(as_bytes(fused[: len(query)]), as_bytes(query))
        found = loader.report()
    return {
        "commit_s": commit_s,
        "copy_s": copy_s,
        "nbytes": manifest.nbytes,
        "tensors": len(manifest),
        "checked": exact and not found["layerwise"] and not found["fallback"],
        "modules_direct": len(found["direct"]),
        "vllm": release,
        "torch": torch.__version__,
    }


def _timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
