"""``vllm-wt bench planner``: seconds, memory and balance of plans for a model of 70,000 tensors.

The instances are those of `vllm_wt_sharded.bench_instances`. Each is planned in a fresh process. The
baseline is what the busiest source gives in any plan at all, at least.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from vllm_wt.cli.bench_result import machine
from vllm_wt.errors import EngineError, Timeout
from vllm_wt_sharded import bench_instances
from vllm_wt_sharded.bench_qwen import computed
from vllm_wt_sharded.planner import lower_bounds, plan

_BOUND = 1.05
"""The most that the busiest source may give, in units of the least possible."""
_SECONDS = 20.0
_MEGABYTES = 4000.0
"""The most that planning may take, the plan's digest included; and the process that has the layouts."""
_PROCESS_S = 500.0
_MAIN = "from vllm_wt_sharded.bench_planner import main; main()"


def planner() -> tuple[dict[str, Any], str]:
    """The result, and it in words.

    Raises:
        EngineError: A measuring process has failed.
        Timeout: One did not end.
    """
    measured = {
        name: measured_apart(name, bench_instances.EXPERTS) for name in bench_instances.DESTINATIONS
    }
    result = result_of(measured)
    lines = [
        f"{name}: {each['needs']} needs, planned in {each['seconds']:.1f} s (at most {_SECONDS:.0f}), "
        f"{each['megabytes']:.0f} MB (at most {_MEGABYTES:.0f}), "
        f"busiest source {each['out_ratio']:.3f} of the bound (at most {_BOUND})"
        for name, each in measured.items()
    ]
    return result, "\n".join(lines)


def result_of(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The common form, from what `measure` says of each destination; the worst one's figures."""
    worst = max(measured.values(), key=lambda each: float(each["out_ratio"]))
    within = all(
        each["seconds"] <= _SECONDS and each["megabytes"] <= _MEGABYTES and each["ratio"] <= _BOUND
        for each in measured.values()
    )
    return {
        "name": "planner",
        "value": worst["out_gigabytes"],
        "baseline": worst["out_bound_gigabytes"],
        "unit": "GB",
        "ratio": worst["out_ratio"],
        "bound": _BOUND,
        "ok": within and worst["out_ratio"] <= _BOUND,
        "samples": {"ours_s": [each["seconds"] for each in measured.values()]},
        "details": {
            **measured,
            "seconds_bound": _SECONDS,
            "megabytes_bound": _MEGABYTES,
            "qwen3_235b": computed(),
            **machine(),
        },
    }


def measure(destination: str, experts: int) -> dict[str, Any]:
    """Plan once, in this process.

    Args:
        destination: One of `bench_instances.DESTINATIONS`.
        experts: In each layer.
    """
    tensors = bench_instances.kimi_k2(experts)
    source = bench_instances.trainer(tensors)
    needs = bench_instances.DESTINATIONS[destination](tensors)
    began, began_cpu = time.perf_counter(), time.process_time()
    found = plan(source, needs)
    planned = time.perf_counter() - began
    digest = found.digest
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out_bound, in_bound = lower_bounds(source, needs)
    out = int(found.bytes_out.max())
    return {
        "tensors": len(tensors),
        "sources": len(source),
        "needs": len(needs),
        "rows": sum(len(share.source_row) for share in found.by_worker.values()),
        "seconds": round(seconds, 3),
        "planned_seconds": round(planned, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "megabytes": round(peak / 1e6, 1),
        "out_gigabytes": round(out / 1e9, 3),
        "out_bound_gigabytes": round(out_bound / 1e9, 3),
        "out_ratio": round(out / out_bound, 4),
        "busiest_gigabytes": round(found.busiest / 1e9, 3),
        "ratio": round(found.busiest / max(out_bound, in_bound), 4),
        "skew_out_in": [round(each, 4) for each in found.skew()],
        "digest": digest,
    }


def measured_apart(destination: str, experts: int) -> dict[str, Any]:
    """What `measure` says in a fresh process, whose memory nothing else has touched.

    Raises:
        EngineError: It has failed.
        Timeout: It did not end.
    """
    command = [sys.executable, "-c", _MAIN, destination, str(experts)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_PROCESS_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Timeout(
            "The measuring process did not end",
            where=destination,
            expected=f"an answer within {_PROCESS_S:.0f} s",
            cure="measure on a host that is less busy",
        ) from error
    if done.returncode != 0:
        raise EngineError(
            "The measuring process has failed",
            where=destination,
            got=f"exit code {done.returncode}",
            cure="see what it said on stderr",
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Measure what is named on the command line: a destination, and how many experts."""
    json.dump(measure(sys.argv[1], int(sys.argv[2])), sys.stdout)
