"""Writes distributions into a folder as pip would have installed them."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from vllm_wt.registry import GROUP

SPEC = """
from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind

@hookimpl
def vllm_wt_backend():
    return BackendSpec(
        name={name!r},
        kind=Kind.TRANSPORT,
        transport="some_package.transport:Transport",
        capabilities=frozenset({{Capability.CPU, Capability.ZERO_COPY}}),
        unsupported={{Capability.CUDA: "host memory only"}},
        summary={summary!r},
    )
"""


def good_source(name: str, summary: str = "moves bytes") -> str:
    return SPEC.format(name=name, summary=summary)


def install(
    site: Path,
    backend: str,
    source: str | None,
    *,
    dist: str | None = None,
    module: str | None = None,
    version: str = "1.0",
) -> str:
    """One distribution with one entry point; the name of its module.

    Args:
        site: A folder that is, or will be, on ``sys.path``.
        backend: Name of the entry point.
        source: Of the module; None writes none.
        dist: Name of the distribution, ``dist-<backend>`` if not given.
        module: Name of the module, made from ``dist`` if not given.
    """
    dist = dist or f"dist-{backend}"
    module = module or f"{dist.replace('-', '_')}_plugin"
    if source is not None:
        (site / f"{module}.py").write_text(source)
    info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{backend} = {module}\n")
    return module


def forget(site: Path) -> None:
    """What was imported from a folder; another test may have modules of the same names."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{site}/"):
            del sys.modules[name]


def entry_points(site: Path) -> list[metadata.EntryPoint]:
    """What is installed in ``site`` alone."""
    found = metadata.distributions(path=[str(site)])
    return [point for dist in found for point in dist.entry_points.select(group=GROUP)]
