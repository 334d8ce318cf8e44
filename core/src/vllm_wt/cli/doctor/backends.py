"""The backends of this environment, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

from vllm_wt import registry
from vllm_wt.cli.doctor import child
from vllm_wt.cli.doctor.finding import Finding


def names() -> tuple[list[str], list[str]]:
    """Backends to be examined, and those that the allow-list leaves out; nothing is imported."""
    installed = {point.name for point in metadata.entry_points(group=registry.GROUP)}
    allowed = os.environ.get(registry.ALLOW_LIST)
    wanted = installed if allowed is None else {name.strip() for name in allowed.split(",")}
    return sorted(installed & wanted), sorted(installed - wanted)


def plugins() -> Iterator[Finding]:
    """Whether there are any, and what the allow-list does."""
    found, left_out = names()
    if found:
        yield Finding("plugins", "ok", ", ".join(found))
    else:
        yield Finding(
            "plugins",
            "problem",
            "no backend is left by the allow-list" if left_out else "no backend is installed",
            f"unset {registry.ALLOW_LIST}" if left_out else "pip install vllm-wt-rdma",
        )
    if left_out:
        yield Finding(
            "vllm-wt-plugins-env",
            "warning",
            f"{registry.ALLOW_LIST}={os.environ[registry.ALLOW_LIST]!r} "
            f"leaves out {', '.join(left_out)}",
            f"name what you need in {registry.ALLOW_LIST}, or unset it",
        )


def examine(name: str) -> Iterator[Finding]:
    """Load one backend and let its package check its fabric: for a child process."""
    points = [p for p in metadata.entry_points(group=registry.GROUP) if p.name == name]
    found = registry.load(points)
    if found.failures:  # two packages with one name fail alike
        failure = found.failures[0]
        what = f"{failure.distribution} {failure.version}: {failure.error}"
        yield Finding(f"{name}-plugin", "problem", what, failure.cure)
        return
    backend = found.backends[name]
    yield Finding(f"{name}-plugin", "ok", f"{backend.distribution} {backend.version}")
    path = backend.spec.doctor
    if path is None:
        yield Finding(f"{name}-doctor", "skipped", f"{backend.distribution} has no checks")
        return
    for finding in child.checked(path, registry.resolve(path, backend=name)()):
        yield replace(finding, id=f"{name}-{finding.id}")
