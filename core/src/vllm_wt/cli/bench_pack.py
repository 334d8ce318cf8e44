"""``vllm-wt bench pack``: many tensors into one buffer and out again, against one flat copy."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.errors import BackendUnavailable

_BOUNDS = {"cpu": 0.85, "cuda": 0.8}
"""The least of the flat copy's rate that is called ok, by device."""
_DTYPES = (
    "bfloat16",
    "float32",
    "float16",
    "int8",
    "float8_e4m3fn",
    "bool",
    "int64",
    "uint8",
    "float64",
)
_SPAN = 1 << 20
"""How many times as large as the smallest tensor the largest is."""


def add_parser(names: Any) -> None:
    pack = names.add_parser(
        "pack",
        help="many tensors into one buffer and out again, against one flat copy of it",
        description="Packs tensors of mixed sizes and dtypes into one buffer, and unpacks it into "
        "other tensors: both at the rate of one copy of the buffer would be a ratio of 1. It takes "
        "four times the payload of memory.",
    )
    pack.add_argument("--device", choices=sorted(_BOUNDS), default="cpu", help="%(default)s")
    pack.add_argument("--megabytes", type=positive, default=2147, help="payload (%(default)s)")
    pack.add_argument("--tensors", type=positive, default=10_000, help="default: %(default)s")
    pack.add_argument("--rounds", type=positive, default=9, help="default: %(default)s")
    pack.add_argument("--json", action="store_true", help="nothing but the JSON object")
    pack.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when the ratio is below the bound, or the bytes are not the same.

    Raises:
        BackendUnavailable: torch has no such device.
    """
    sizes = _sizes(arguments.megabytes * 1_000_000, arguments.tensors)
    measured = _measured(arguments.device, sizes, arguments.rounds)
    ours, flat, nbytes = (measured.pop(key) for key in ("ours_s", "baseline_s", "nbytes"))
    bound = _BOUNDS[arguments.device]
    ratio = round(statistics.median(2 * f / o for o, f in zip(ours, flat, strict=True)), 3)
    result = {
        "name": "pack",
        "value": round(2 * nbytes / statistics.median(ours) / 1e9, 3),
        "baseline": round(nbytes / statistics.median(flat) / 1e9, 3),
        "unit": "GB/s",
        "ratio": ratio,
        "bound": bound,
        "ok": ratio >= bound and measured["checked"],
        "samples": {"ours_s": ours, "baseline_s": flat},
        "details": {
            "device": arguments.device,
            "megabytes": round(nbytes / 1e6, 1),
            "tensors": arguments.tensors,
            **measured,
            **machine(),
        },
    }
    summary = (
        f"{nbytes / 1e6:.0f} MB in {arguments.tensors} tensors: pack and unpack "
        f"{result['value']:.2f} GB/s, one flat copy {result['baseline']:.2f} GB/s, "
        f"ratio {ratio:.2f} (at least {bound})"
    )
    return report(result, summary, json_only=arguments.json)


def _sizes(nbytes: int, tensors: int) -> list[int]:
    """Bytes of each tensor: as many of each order of magnitude, the same in every run."""
    random_ = random.Random(0)
    shares = [math.exp(random_.random() * math.log(_SPAN)) for _ in range(tensors)]
    unit = nbytes / sum(shares)
    return [int(share * unit) for share in shares]


def _measured(device_type: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Seconds of both sides in turns, over the same bytes."""
    import torch

    from vllm_wt.manifest import Manifest
    from vllm_wt.packing import DTYPES, Copies, Layout, as_bytes, meta_of

    device = _device(device_type)
    torch.manual_seed(0)
    dtypes = [DTYPES[name] for name in _DTYPES]
    tensors = {}
    for number, size in enumerate(sizes):
        dtype = dtypes[number % len(dtypes)]
        nbytes = max(1, size // dtype.itemsize) * dtype.itemsize
        words = torch.empty(-(-nbytes // 8), dtype=torch.int64, device=device).random_()
        values = words.view(torch.uint8)[:nbytes]
        tensors[f"tensor{number}"] = values & 1 == 1 if dtype == torch.bool else values.view(dtype)
    layout = Layout(Manifest(tuple(meta_of(name, each) for name, each in tensors.items())))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    flat = torch.zeros_like(buffer)
    received = {name: torch.zeros_like(each) for name, each in tensors.items()}
    views = dict(layout.views(buffer))
    pack = Copies((views[name], each) for name, each in tensors.items())
    unpack = Copies((each, views[name]) for name, each in received.items())
    pack_s, unpack_s, flat_s = [], [], []
    for number in range(-2, rounds):  # two rounds to touch all memory
        steps = [_timed(step, device_type) for step in (pack.run, unpack.run)]
        copy = _timed(lambda: flat.copy_(buffer), device_type)
        if number >= 0:
            pack_s.append(steps[0])
            unpack_s.append(steps[1])
            flat_s.append(copy)
    return {
        "ours_s": [sum(steps) for steps in zip(pack_s, unpack_s, strict=True)],
        "baseline_s": flat_s,
        "nbytes": layout.manifest.nbytes,
        "pack_s": statistics.median(pack_s),
        "unpack_s": statistics.median(unpack_s),
        "checked": all(
            torch.equal(as_bytes(received[name]), as_bytes(each)) for name, each in tensors.items()
        ),
        "dtypes": len({each.dtype for each in tensors.values()}),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _device(name: str) -> Any:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            "There is no CUDA device to measure on",
            where="bench pack",
            expected="a device that torch can use",
            got=f"torch {torch.__version__} without one",
            cure="leave --device out to measure on the CPU",
        )
    return torch.device(name)


def _timed(step: Callable[[], Any], device_type: str) -> float:
    import torch

    def wait() -> None:
        if device_type == "cuda":
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began
