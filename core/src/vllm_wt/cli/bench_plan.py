"""``vllm-wt bench plan``: what recording a load costs once, and what it saves in every round.

The model is one of vLLM's with many experts, and so small that time is Python's overhead, not bytes.
Its tensors are written by the recorded plan and by vLLM's layerwise reload, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.cli.plan import require_vllm, stdout_kept
from vllm_wt.errors import EngineError, Timeout, WeightTransferError, from_facts

_BOUND = 0.1
"""The most of vLLM's time for a tensor that ours may take."""
_SECONDS = 5.0
_MEGABYTES = 500.0
"""The most that recording may take, in time and in memory."""
_PROCESS_S = 900.0
_MAIN = "from vllm_wt.cli.bench_plan import main; main()"

_REAL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vocab_size": 151936,
}
"""Shapes of Qwen3-30B-A3B: 18,867 tensors, 61 GB."""

_SMALL = {
    "head_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
"""32 is the least that vLLM's experts on a CPU take as they are."""


def add_parser(names: Any) -> None:
    plan = names.add_parser(
        "plan", help="a recorded load against vLLM's layerwise reload, on a CPU"
    )
    plan.add_argument("--layers", type=positive, default=51, help="default: %(default)s")
    plan.add_argument("--experts", type=positive, default=128, help="in each layer (%(default)s)")
    plan.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    plan.add_argument(
        "--small-only", action="store_true", help="do not record a model of real size as well"
    )
    plan.add_argument("--json", action="store_true", help="nothing but the JSON object")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a bound is missed: of the ratio, or of recording in time or memory.

    Raises:
        BackendUnavailable: vLLM is not installed.
        EngineError: vLLM fails with the model.
        Timeout: A measuring process did not end.
    """
    require_vllm("What is measured is against vLLM's own reload")
    small = {"num_hidden_layers": arguments.layers, "num_experts": arguments.experts} | _SMALL
    models = {"small": _REAL | small}
    if not arguments.small_only:
        models["qwen3-30b-a3b"] = _REAL
    with tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder:
        for name, config in models.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        recorded = {
            name: _in_process({"measure": "recording", "model": f"{folder}/{name}", "times": times})
            for name, times in zip(models, (3, 1), strict=False)
        }
        rounds = _in_process(
            {"measure": "rounds", "model": f"{folder}/small", "rounds": arguments.rounds}
        )
    result = _result(recorded, rounds)
    details = result["details"]
    summary = (
        f"{details['tensors']} tensors: {result['value']:.1f} us each, vLLM's layerwise reload "
        f"{result['baseline']:.1f} us, ratio {result['ratio']:.3f} (at most {_BOUND}); recorded in "
        f"{details['seconds']:.2f} s (at most {_SECONDS:.0f}) and {details['megabytes']:.0f} MB "
        f"(at most {_MEGABYTES:.0f})"
    )
    return report(result, summary, json_only=arguments.json)


def _result(recorded: dict[str, Any], rounds: dict[str, Any]) -> dict[str, Any]:
    ours, theirs, tensors = rounds["ours_s"], rounds["baseline_s"], rounds["tensors"]
    ratio = round(statistics.median(o / t for o, t in zip(ours, theirs, strict=True)), 4)
    small, *real = recorded.values()
    within = small["seconds"] <= _SECONDS and small["megabytes"] <= _MEGABYTES
    return {
        "name": "plan",
        "value": round(statistics.median(ours) / tensors * 1e6, 3),
        "baseline": round(statistics.median(theirs) / tensors * 1e6, 3),
        "unit": "us/tensor",
        "ratio": ratio,
        "bound": _BOUND,
        "ok": ratio <= _BOUND and within and rounds["checked"],
        "samples": {"ours_s": ours, "baseline_s": theirs},
        "details": {
            **small,
            "seconds_bound": _SECONDS,
            "megabytes_bound": _MEGABYTES,
            "copies": rounds["copies"],
            "checked": rounds["checked"],
            "real_model": real[0] if real else None,
            "vllm": rounds["vllm"],
            "torch": rounds["torch"],
            **machine(),
        },
    }


def _in_process(config: dict[str, Any]) -> dict[str, Any]:
    """Measure in a fresh process, whose memory nothing else has touched.

    Raises:
        WeightTransferError: What was raised there, or that it ended without an answer.
        Timeout: It did not end.
    """
    command = [sys.executable, "-c", _MAIN, json.dumps(config)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_PROCESS_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Timeout(
            "The measuring process did not end",
            where=config["measure"],
            expected=f"an answer within {_PROCESS_S:.0f} s",
            cure="measure fewer --layers, or on a host that is less busy",
        ) from error
    if done.returncode != 0:
        raise EngineError(
            "The measuring process has failed",
            where=config["measure"],
            got=f"exit code {done.returncode}",
            cure="see what it said on stderr",
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise from_facts(answer["error"])
    return answer


def main() -> None:
    config = json.loads(sys.argv[1])
    measure = {"recording": _recording, "rounds": _rounds}[config["measure"]]
    with stdout_kept():
        try:
            answer = measure(config)
        except WeightTransferError as error:
            answer = {"error": error.facts()}
    print(json.dumps(answer))


def _recording(config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the fastest recording, megabytes that the first one took at its peak."""
    from vllm_wt.bridge.skeleton import skeleton
    from vllm_wt.sources.checkpoint import manifest_of

    manifest = manifest_of(config["model"])
    from vllm_wt.bridge.planning import rehearse

    seconds, cpu_seconds = [], []
    with skeleton(config["model"]) as built:
        gc.collect()
        before = _resident()
        peak = 0
        for _ in range(config["times"]):
            began, began_cpu = time.perf_counter(), time.process_time()
            rehearsal = rehearse(built.model, built.vllm_config, built.device, manifest)
            cpu_seconds.append(time.process_time() - began_cpu)
            seconds.append(time.perf_counter() - began)
            peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "tensors": len(manifest),
        "megabytes_of_weights": round(manifest.nbytes / 1e6, 1),
        "seconds": round(min(seconds), 3),
        "all_seconds": [round(each, 3) for each in seconds],
        "cpu_seconds": round(min(cpu_seconds), 3),
        "megabytes": round(max(peak - before, 0) / 1e6, 1),
        "modules_direct": len(rehearsal.tiers.direct),
        "modules_layerwise": len(rehearsal.tiers.layerwise),
        "modules_fallback": len(rehearsal.tiers.fallback),
    }


def _resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _rounds(config: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round, of both sides in turns, over the same model and the same tensors."""
    import torch
    from vllm import __version__ as release

    # Else vLLM's CPU kernels would take the linear layers' weights away, to write nothing into.
    import vllm_wt.testing.unpacked  # noqa: F401
    from vllm_wt.bridge import arming, compat
    from vllm_wt.bridge.planning import rehearse
    from vllm_wt.bridge.skeleton import skeleton
    from vllm_wt.loading.apply import DirectWrites
    from vllm_wt.packing import DTYPES
    from vllm_wt.sources.checkpoint import manifest_of

    torch.set_num_threads(1)
    manifest = manifest_of(config["model"])
    generator = torch.Generator().manual_seed(0)
    sources = {
        each.name: torch.randn(each.shape, generator=generator).to(DTYPES[each.dtype])
        for each in manifest.tensors
    }
    with skeleton(config["model"], memory=True) as built:
        device = torch.device("cpu")
        plan = rehearse(built.model, built.vllm_config, device, manifest).plan
        held = {
            name: getattr(built.model.get_submodule(each.module), each.name)
            for name, each in plan.parameters.items()
        }
        writes = DirectWrites(plan, held)

        def reload() -> None:
            arming.arm(built.model)
            built.model.load_weights(iter(sources.items()))
            arming.finalize(built.model, built.vllm_config.model_config)

        ours_s, theirs_s, same = [], [], []
        for number in range(-1, config["rounds"]):
            for tensor in held.values():
                tensor.data.zero_()
            ours = _timed(lambda: writes.run(sources), built.vllm_config, device)
            written = {name: tensor.detach().clone() for name, tensor in held.items()}
            theirs = _timed(reload, built.vllm_config, device)
            if number >= 0:  # in the first round vLLM packs the experts, which it does only once
                ours_s.append(ours)
                theirs_s.append(theirs)
                same.append(all(torch.equal(written[n], tensor) for n, tensor in held.items()))
        compat.synchronize(device)
    return {
        "tensors": len(manifest),
        "copies": len(plan.copies),
        "ours_s": ours_s,
        "baseline_s": theirs_s,
        "checked": all(same),
        "vllm": release,
        "torch": torch.__version__,
    }


def _timed(step: Callable[[], Any], vllm_config: Any, device: Any) -> float:
    """Seconds of a step, in the context that loaders run in."""
    from vllm_wt.bridge import compat

    gc.collect()
    with compat.load_context(vllm_config, device):
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
