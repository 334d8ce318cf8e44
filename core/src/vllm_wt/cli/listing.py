"""``vllm-wt list``: the backends of this environment."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from typing import Any

from vllm_wt import registry
from vllm_wt.spec import Kind


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("list", help="backends that are installed, and those that fail")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a package failed to load."""
    found = registry.load()
    backends = [
        {
            "name": name,
            "vllm_name": _vllm_name(name),
            "kind": backend.spec.kind.value,
            "native": backend.spec.native is not None,
            "transports": list(backend.spec.transports),
            "distribution": backend.distribution,
            "version": backend.version,
            "capabilities": sorted(one.value for one in backend.spec.capabilities),
            "unsupported": {one.value: why for one, why in backend.spec.unsupported.items()},
            "summary": backend.spec.summary,
        }
        for name, backend in sorted(found.backends.items())
    ]
    failures = [vars(failure) for failure in found.failures]
    if arguments.json:
        print(json.dumps({"backends": backends, "failures": failures}))
    else:
        _print(backends, failures)
    return 1 if failures else 0


def _vllm_name(backend: str) -> str | None:
    """The name for ``WeightTransferConfig`` here; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_wt.bridge.register import name_in_vllm, register

    register()
    return name_in_vllm(backend)


def _kinds(row: dict[str, Any]) -> str:
    """Its kind, its transports where it has several, and that it has an engine in vLLM's own form."""
    both = row["native"] and row["kind"] != Kind.NATIVE.value
    kind = f"{row['kind']}({','.join(row['transports'])})" if row["transports"] else row["kind"]
    return f"{kind}+native" if both else str(kind)


def _print(backends: list[dict[str, Any]], failures: list[dict[str, Any]]) -> None:
    """Plain lines, so that nothing is cut to a terminal's width."""
    rows = [
        (
            row["name"],
            f'backend="{row["vllm_name"]}"' if row["vllm_name"] else "(vLLM not installed)",
            _kinds(row),
            f"{row['distribution']} {row['version']}",
            row["summary"],
        )
        for row in backends
    ]
    if rows:
        rows.insert(0, ("backend", "in vLLM", "kind", "distribution", "summary"))
    else:
        print("No backends installed. Cure: pip install vllm-wt-rdma")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for failure in failures:
        print(
            f"{failure['name']} ({failure['distribution']} {failure['version']}): "
            f"{failure['error']}\n  Cure: {failure['cure']}"
        )
