"""``vllm-wt check``: the conformance kit on an installed backend."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_wt import registry
from vllm_wt.errors import BackendUnavailable, InvalidInfo
from vllm_wt.spec import BackendSpec, Capability

_PYTESTS_OWN = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}
"""Settings that are for another project."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="hold an installed backend to the contract",
        description="Runs the conformance kit, docs/contract.md as checks over real processes.",
    )
    parser.add_argument("backend", metavar="BACKEND", help="its name, as `vllm-wt list` shows it")
    parser.add_argument(
        "--transport",
        "--wt-transport",
        dest="transport",
        metavar="NAME",
        help="which of its transports, where it has several [the default]",
    )
    parser.add_argument(
        "--device",
        "--wt-device",
        dest="device",
        help="torch device of all memory [cpu, or what is claimed]",
    )
    parser.add_argument(
        "--report",
        "--wt-report",
        dest="report",
        metavar="FILE",
        help="write the closing report as JSON",
    )
    parser.add_argument(
        "--known-failures",
        "--wt-known-failures",
        dest="known_failures",
        metavar="FILE",
        help="checks that fail for now, `name  # reason` on a line; one that passes is a failure",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only these checks, as pytest's -k")
    parser.add_argument("-x", action="store_true", help="end at the first failure")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """pytest's exit code: 0 when every check has passed, or was known to fail and did.

    Raises:
        BackendUnavailable: No such backend, or no pytest, or the transport's library is missing.
        PluginError: It is installed and broken.
        InvalidInfo: The device cannot be used, or there is no such transport.
    """
    spec = registry.default().get(arguments.backend).spec
    if importlib.util.find_spec("pytest") is None:
        raise BackendUnavailable(
            "The conformance kit needs pytest",
            where="vllm-wt check",
            cure="pip install 'vllm-wt[conformance]'",
        )
    device = _device(arguments.device, spec)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "vllm_wt.testing.plugin",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
        "/dev/null",  # whatever project we are called in, its settings are not ours
        "--rootdir",
        ".",
        "-q",
        "--no-header",
        "--tb=short",
        "-rN",  # the closing report says it better
        "--pyargs",
        "vllm_wt.testing.check",
        f"--wt-backend={spec.name}",
        f"--wt-device={device}",
    ]
    if arguments.transport is not None:
        from vllm_wt.backends import transport_chosen

        name, _ = transport_chosen(spec, arguments.transport)
        command.append(f"--wt-transport={name}")
    if arguments.known_failures is not None:
        command.append(f"--wt-known-failures={arguments.known_failures}")
    if arguments.k is not None:
        command.append(f"-k={arguments.k}")
    if arguments.x:
        command.append("-x")
    with tempfile.TemporaryDirectory(prefix="vllm-wt-") as folder:
        report = Path(arguments.report or f"{folder}/report.json")
        code = _run([*command, f"--wt-report={report}"])
        if code == 0 and not (report.is_file() and report.stat().st_size):
            print("vllm-wt: the check has ended without a report", file=sys.stderr)
            return 1
    return code


def _device(wanted: str | None, spec: BackendSpec) -> str:
    """The device that all memory is to be on.

    Raises:
        InvalidInfo: There is no such device, or the backend does not claim its memory.
    """
    import torch

    device = wanted or ("cpu" if Capability.CPU in spec.capabilities else "cuda")
    kinds = {"cpu": Capability.CPU, "cuda": Capability.CUDA}
    claimed = [kind for kind, one in kinds.items() if one in spec.capabilities]
    kind = device.partition(":")[0]
    there = kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    if not there or (wanted and claimed and kind not in claimed):
        raise InvalidInfo(
            f"The checks cannot run on device {device!r}",
            backend=spec.name,
            where="--device",
            expected=f"memory that the backend claims ({', '.join(claimed) or 'none'}), on this host",
            got=device if there else f"{device}, which this host does not have",
            cure="leave --device out, or run it on a host with that device",
        )
    return device


def _run(command: list[str]) -> int:
    """Run pytest to its end, which cleans up: an interrupt is for it, and so is a signal to us."""
    environment = {k: v for k, v in os.environ.items() if k not in _PYTESTS_OWN}
    # What lies in the current folder is not to be imported.
    with subprocess.Popen(command, env=environment | {"PYTHONSAFEPATH": "1"}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
        while True:
            with suppress(KeyboardInterrupt):
                return process.wait()
