"""``vllm-wt bench``: how fast vllm-wt is, as ratios from one run; here, a backend on the wire.

Both sides of a ratio run alternately, between the same two processes, with buffers touched, peers
warm and the owner polling alike. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from vllm_wt import registry
from vllm_wt.cli import (
    bench_commit,
    bench_fleet,
    bench_overlap,
    bench_pack,
    bench_plan,
    bench_round,
)
from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.errors import BackendUnavailable, PeerDead
from vllm_wt.spec import BackendSpec, Kind

_WIRE_BOUND = 0.9
"""The least ratio of our wire stage, but for digests, to the raw fabric that is called ok."""
_OTHER_BOUND = 0.8
"""The same of a Transport that is not the backend's default."""
_MAPPED_BOUND = 0.75
"""The same where workers map the memory, and the fabric is one copy of the bytes."""
_ENGINE_BOUNDS = {"cpu": 0.85, "cuda": 0.9}
"""The same of a backend that is an engine of its own, by device."""
_SIZES = {Kind.TRANSPORT: (400, 300), Kind.ENGINE: (1074, 10_000)}
"""Megabytes and tensors, by the kind of backend: one that packs is to show it on small tensors."""
_VERIFY_BOUND = 0.2
"""The most that verifying by digests may add to the wire stage."""
_ROUND_S = 120.0
_START_S = 120.0


class Baseline(Protocol):
    """A fabric without us: see ``BackendSpec.baseline``. Made as ``Baseline(name, device)``."""

    def expose(self, buffer: Any) -> str: ...

    def progress(self) -> None: ...

    def connect(self, handle: str, target: Any, parts: int) -> None:
        """The buffer is to be read as so many of equal size, where the fabric cares."""

    def read(self, deadline: Any) -> None: ...


class Benchmark(Protocol):
    """A benchmark of a backend package: see ``BackendSpec.benchmarks``. A plain function."""

    def __call__(self) -> tuple[dict[str, Any], str]:
        """The result, as `vllm_wt.cli.bench_result.report` prints it, and it in words."""


def add_parser(commands: Any, *, of_packages: bool = False) -> None:
    """Add the command, and on request the benchmarks of the backends that are installed."""
    parser = commands.add_parser("bench", help="measure against what there is without vllm-wt")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    wire = names.add_parser("wire", help="a backend, trainer to worker, against the bare fabric")
    wire.add_argument("--backend", default="rdma", help="default: %(default)s")
    wire.add_argument("--transport", help="which of its transports, where it has several")
    wire.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    wire.add_argument(
        "--owner-device",
        help="the trainer's (the same, or the next GPU for a backend that needs one for each side)",
    )
    wire.add_argument("--megabytes", type=positive, help=f"payload (default: {_sizes(0)})")
    wire.add_argument("--tensors", type=positive, help=f"default: {_sizes(1)}")
    wire.add_argument("--rounds", type=positive, default=9, help="default: %(default)s")
    wire.add_argument("--json", action="store_true", help="nothing but the JSON object")
    wire.set_defaults(run=run_wire)
    bench_fleet.add_parser(names)
    bench_plan.add_parser(names)
    bench_commit.add_parser(names)
    bench_pack.add_parser(names)
    bench_overlap.add_parser(names)
    bench_round.add_parser(names)
    for name, backend in registry.default().backends.items() if of_packages else ():
        for title, path in backend.spec.benchmarks.items():
            _add_package_parser(names, name, title, path)


def _add_package_parser(names: Any, backend: str, title: str, path: str) -> None:
    known = f"{backend}-{title}" if title in names.choices else title
    parser = names.add_parser(known, help=f"of the backend {backend}")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.set_defaults(run=run_package, backend=backend, path=path)


def run_package(arguments: argparse.Namespace) -> int:
    """A benchmark of a backend package; exit code 1 when it misses its bound.

    Raises:
        BackendUnavailable: Its code cannot be imported.
        PluginError: There is no such function.
    """
    benchmark: Benchmark = registry.resolve(arguments.path, backend=arguments.backend)
    result, summary = benchmark()
    return report(result, summary, json_only=arguments.json)


def run_wire(arguments: argparse.Namespace) -> int:
    """Exit code 1 when the ratio is below the bound."""
    spec = registry.default().get(arguments.backend).spec
    if spec.baseline is None or spec.kind not in _SIZES:
        raise BackendUnavailable(
            f"Backend {spec.name!r} has no bare fabric to compare with",
            backend=spec.name,
            expected="a backend with a baseline",
            cure="choose another backend",
        )
    arguments.transport = _transport(spec, arguments.transport)
    megabytes, tensors = _SIZES[spec.kind]
    arguments.megabytes = arguments.megabytes or megabytes
    arguments.tensors = arguments.tensors or tensors
    with tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder:
        result = _measure_wire(arguments, Path(folder), spec)
    details = result["details"]
    summary = (
        f"{details['megabytes']} MB in {details['tensors']} tensors: "
        f"{result['value']:.2f} GB/s, bare fabric {result['baseline']:.2f} GB/s, "
        f"ratio {result['ratio']:.2f} (at least {result['bound']}); "
    )
    if details["mapped"]:
        summary += f"verified where it is; received instead, ratio {details['received_ratio']:.2f}"
    else:
        summary += (
            f"digests cost {details['digests_cost']:.0%} of it (at most {_VERIFY_BOUND:.0%}), "
            f"ratio with them {details['verified_ratio']:.2f}"
        )
    return report(result, summary, json_only=arguments.json)


def _transport(spec: BackendSpec, option: str | None) -> str:
    """The name of the Transport; empty for the default.

    Raises:
        InvalidInfo: There is no such Transport.
        BackendUnavailable: Its libraries are missing.
    """
    from vllm_wt.backends import transport_chosen

    return "" if option is None else transport_chosen(spec, option)[0]


def _measure_wire(arguments: argparse.Namespace, folder: Path, spec: BackendSpec) -> dict[str, Any]:
    config = {
        "socket": str(folder / "owner.sock"),
        "backend": arguments.backend,
        "transport": arguments.transport,
        "device": arguments.owner_device or _owner_device(spec, arguments.device),
        "nbytes": arguments.megabytes * 1_000_000,
        "tensors": arguments.tensors,
    }
    environment = dict(os.environ)
    if config["device"] == arguments.device:  # NCCL takes two ranks on one GPU from two hosts alone
        environment["NCCL_HOSTID"] = "vllm-wt-bench-owner"
    owner = subprocess.Popen(
        [sys.executable, "-m", "vllm_wt.cli.bench_owner", json.dumps(config)],
        stdout=subprocess.DEVNULL,  # UCX logs there
        env=environment,
    )
    try:
        samples, nbytes, checked = _rounds(config, arguments.device, owner, arguments.rounds)
    finally:
        owner.kill()
        owner.wait(10)
    ours, counted, raw = samples["digest"], samples["bytes"], samples["raw"]
    received = samples.get("received")
    mapped = received is not None
    bound = _bound(spec, arguments.transport, arguments.device, mapped=mapped)
    moved = ours if mapped else counted
    ratio = round(_ratio(raw, moved), 3)
    verify = round(_ratio(ours, counted) - 1, 3)
    return {
        "name": "wire",
        "value": round(nbytes / statistics.median(moved) / 1e9, 3),
        "baseline": round(nbytes / statistics.median(raw) / 1e9, 3),
        "unit": "GB/s",
        "ratio": ratio,
        "bound": bound,
        "ok": ratio >= bound and checked and (mapped or verify <= _VERIFY_BOUND),
        "samples": {
            "ours_s": moved,
            "baseline_s": raw,
            **({"without_digests_s": counted} if mapped else {"with_digests_s": ours}),
            **({} if received is None else {"received_s": received}),
        },
        "details": {
            "backend": arguments.backend,
            "transport": arguments.transport,
            "device": arguments.device,
            "owner_device": config["device"],
            "megabytes": nbytes / 1e6,
            "tensors": arguments.tensors,
            "checked": checked,
            "mapped": mapped,
            **(
                {
                    "digests_cost": verify,
                    "digests_cost_bound": _VERIFY_BOUND,
                    "verified_ratio": round(_ratio(raw, ours), 3),
                }
                if received is None
                else {"received_ratio": round(_ratio(raw, received), 3)}
            ),
            **machine(),
        },
    }


def _owner_device(spec: BackendSpec, device: str) -> str:
    import torch

    if spec.kind is Kind.ENGINE and device == "cuda" and torch.cuda.device_count() > 1:
        return "cuda:1"
    return device


def _sizes(which: int) -> str:
    return ", ".join(f"{sizes[which]} of kind {kind.value}" for kind, sizes in _SIZES.items())


def _bound(spec: BackendSpec, transport: str, device: str, *, mapped: bool) -> float:
    if spec.kind is Kind.ENGINE:
        return _ENGINE_BOUNDS[device.partition(":")[0]]
    if mapped:
        return _MAPPED_BOUND
    default = not transport or spec.transports[transport] == spec.transport
    return _WIRE_BOUND if default else _OTHER_BOUND


def _ratio(one: list[float], other: list[float]) -> float:
    """How many times ``other`` goes into ``one``, the median of rounds."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _rounds(
    config: dict[str, Any], reader_device: str, owner: subprocess.Popen[bytes], rounds: int
) -> tuple[dict[str, list[float]], int, bool]:
    """Seconds of each side, bytes, and whether what came was right."""
    import torch

    from vllm_wt.backends import worker_engine
    from vllm_wt.cli.bench_owner import baseline_of, sides_of
    from vllm_wt.deadline import Deadline
    from vllm_wt.engine import WeightTransferEngine, WorkerContext
    from vllm_wt.loading.staging import Known, Staging

    backend, device = config["backend"], torch.device(reader_device)
    transport = config["transport"]
    client = _connect(Path(config["socket"]), owner)
    engines: dict[str, WeightTransferEngine[Any, Any]] = {}
    spec = registry.default().get(backend).spec
    context = WorkerContext(backend=backend, device=device, rank=0, size=1)
    for side in sides_of(spec, transport):
        engine = engines[side] = worker_engine(context)
        init = engine.init_info_cls.from_wire(client.call("describe", side), backend=backend)
        engine.init_transfer_engine(init)
    manifest = init.manifest()
    raw_cls = registry.resolve(baseline_of(spec, transport), backend=backend)
    raw = raw_cls(f"raw-{os.getpid()}", device)
    target = torch.zeros(manifest.nbytes, dtype=torch.uint8, device=device)
    raw.connect(client.call("expose_raw"), target, len(manifest))
    samples: dict[str, list[float]] = {side: [] for side in (*engines, "raw")}
    known = {side: Known() for side in engines}
    checked = True
    for number in range(-2, rounds):  # two rounds to warm up all sides
        for side, engine in engines.items():
            info = client.call("publish", side, number + 3)
            staging = Staging(manifest, known[side])
            began = time.perf_counter()
            update = engine.update_info_cls.from_wire(info, backend=backend)
            engine.receive_weights(update, staging)
            samples[side].append(time.perf_counter() - began)
            client.call("sent")
            staging.require_complete()
            last = staging.weights()[-1][1]
            checked = checked and bool(client.call("last_value") == last[-1].item())
        began = time.perf_counter()
        raw.read(Deadline(_ROUND_S))
        samples["raw"].append(time.perf_counter() - began)
    for engine in engines.values():
        engine.shutdown()
    return {side: seconds[2:] for side, seconds in samples.items()}, manifest.nbytes, checked


def _connect(path: Path, owner: subprocess.Popen[bytes]) -> Any:
    from vllm_wt.clients.relay import RelayClient

    end = time.monotonic() + _START_S
    while True:
        try:
            return RelayClient(path, timeout_s=_ROUND_S)
        except PeerDead:
            if owner.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.05)
