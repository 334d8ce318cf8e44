"""``vllm-wt doctor``: what would stop a sync on this host, or to a server, and the cures.

Whatever may hang or crash (a fabric, a driver, vLLM, a backend's package) runs in a process of its
own under a deadline; a check that fails itself is a problem of that check.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from vllm_wt.cli.doctor import backends, child, engine, host, server
from vllm_wt.cli.doctor.finding import STATUSES, Finding
from vllm_wt.deadline import MAX_S

Check = Callable[[], Iterable[Finding]]

_DEADLINE_S = 90.0
_PACKAGE = "vllm_wt.cli.doctor"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what would stop a sync here, and the cure")
    parser.add_argument("url", nargs="?", help="check a running vLLM server instead of this host")
    parser.add_argument("--token", help="the server's API key, if what is before it wants one")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=_DEADLINE_S,
        metavar="SECONDS",
        help="for each check that runs in a process of its own (%(default)s)",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_S:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {MAX_S}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when something would stop a sync."""
    checks: dict[str, Check]
    if arguments.url is not None:
        checks = {"server-reachable": partial(server.examine, arguments.url, arguments.token)}
    else:
        checks = _host_checks(arguments.deadline)
    findings = examine(checks)
    ok = all(finding.status != "problem" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    return 0 if ok else 1


def examine(checks: dict[str, Check]) -> list[Finding]:
    """Run checks side by side, most of them only wait for a child; worst findings first."""
    pool = ThreadPoolExecutor(max_workers=4)
    try:
        found = pool.map(lambda item: _guarded(*item), checks.items())
        findings = [finding for each in found for finding in each]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        child.end_all()  # those that an interrupt has left
    return sorted(findings, key=lambda finding: STATUSES.index(finding.status))


def _guarded(check: str, function: Check) -> list[Finding]:
    try:
        return list(function())
    except Exception as error:
        what = f"the check itself failed: {type(error).__name__}: {error}"
        return [Finding(check, "problem", what, "report it as a bug of vllm-wt")]


def _host_checks(deadline_s: float) -> dict[str, Check]:
    def in_child(check: str, module: str, function: str, *arguments: str) -> Check:
        path = f"{_PACKAGE}.{module}:{function}"
        return partial(child.examine, check, path, *arguments, deadline_s=deadline_s)

    def seen_by_vllm() -> Iterable[Finding]:
        if not engine.is_installed():
            return [Finding("seen-by-vllm", "skipped", "vLLM is not installed")]
        return in_child("seen-by-vllm", "engine", "seen_by_vllm")()

    checks: dict[str, Check] = {"seen-by-vllm": seen_by_vllm}  # the slowest begins first
    for name in backends.names()[0]:
        checks[f"{name}-doctor"] = in_child(f"{name}-doctor", "backends", "examine", name)
    return {
        **checks,
        "cuda": in_child("cuda", "host", "cuda"),
        "ptrace": in_child("ptrace", "host", "ptrace"),
        "ports": in_child("ports", "host", "ports"),
        "plugins": backends.plugins,
        "vllm-release": engine.vllm_release,
        "vllm-plugins-env": engine.plugins_env,
        "dev-mode": engine.dev_mode,
        "shm": host.shm,
        "file-descriptors": host.file_descriptors,
    }


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.id) for finding in findings)
    for finding in findings:
        found = " | ".join(finding.found.splitlines())
        print(f"{finding.status:8} {finding.id:{width}}  {found}")
        if finding.cure:
            print(f"{'':8} {'':{width}}  Cure: {finding.cure}")
    problems = sum(finding.status == "problem" for finding in findings)
    warnings = sum(finding.status == "warning" for finding in findings)
    print(f"\n{len(findings)} checks: {problems} problems, {warnings} warnings.")
