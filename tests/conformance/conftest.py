"""Installs the mutants as one distribution, in a folder that goes when the tests are done."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_wt import registry
from vllm_wt.testing.conformance import harness
from vllm_wt.testing.conformance.harness import Sync
from vllm_wt.testing.conformance.process import Forker

HERE = str(Path(__file__).parent / "mutants")
sys.path.insert(0, HERE)

from catalogue import MUTANTS, SOUND  # noqa: E402

MOMENTS_S = 7.0
LONG_S = 14.0
AGREEMENT_S = 14.0
ROUNDS = 30
LARGE = 16 << 20
"""Less than the kit's, since a mutant that hangs takes all of it."""

_PLUGIN = """
from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind
{imports}

class Plugin:
    def __init__(self, **fields):
        self.fields = fields

    def __dir__(self):  # each process of the kit has pluggy look through all of them
        return ["vllm_wt_backend"]

    @hookimpl
    def vllm_wt_backend(self):
        return BackendSpec(**self.fields)
"""
_WARM = "WARM_FORKER"
_SITECUSTOMIZE = f"""
import os

if os.environ.pop({_WARM!r}, None):
    import gc

    import engines
    import mappings
    from vllm_wt import registry

    registry.default()
    gc.freeze()
"""
"""Makes the forker import what each of its hundreds of processes would import anew."""
_BACKEND = """
{attribute} = Plugin(
    name={name!r},
    kind=Kind({kind!r}),
    transport={transport!r},
    worker={worker!r},
    trainer={trainer!r},
    capabilities=frozenset(map(Capability, {capabilities!r})),
)
"""


class SharedForker(Forker):
    """For several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def fork(self, role: str) -> tuple[int, socket.socket, Path]:
        with self._lock:
            return super().fork(role)


@pytest.fixture(scope="session")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Starts processes in which the mutants, and the sound pair of engines, are installed."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        modules = _install(site)
        paths = [str(site), HERE]
        patch.setattr(sys, "path", [*paths, *sys.path])
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        )
        _be_quick(patch)
        registry.default.cache_clear()
        with patch.context() as warm:
            warm.setenv(_WARM, "1")
            forker = SharedForker()
        with forker:
            yield forker
    registry.default.cache_clear()
    for name in {*modules, "catalogue", "engines", "mappings", "mutant", "transports"}:
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != HERE]


def _install(site: Path) -> set[str]:
    """Write a distribution; its modules."""
    sources = {"mutants_plugin": _PLUGIN.format(imports="")}
    points = ""
    for mutant in (*SOUND, *MUTANTS):
        attribute = mutant.name.replace("-", "_")
        module = "mutants_plugin"
        if mutant.imports:
            module = f"mutants_plugin_{attribute}"
            sources[module] = _PLUGIN.format(imports=f"import {mutant.imports}")
        sources[module] += _BACKEND.format(
            attribute=attribute,
            name=mutant.name,
            kind=mutant.kind,
            transport=mutant.transport,
            worker=mutant.worker,
            trainer=mutant.trainer,
            capabilities=mutant.capabilities,
        )
        points += f"{mutant.name} = {module}:{attribute}\n"
    for module, source in sources.items():
        (site / f"{module}.py").write_text(source)
    (site / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    info = site / "mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{points}")
    return set(sources)


def _be_quick(patch: pytest.MonkeyPatch) -> None:
    """Shorten the deadlines of the kit, wherever they were imported."""
    kit_s = harness.LONG_S
    kit = "vllm_wt.testing.conformance."
    short = {"MOMENTS_S": MOMENTS_S, "LONG_S": LONG_S, "_AGREEMENT_S": AGREEMENT_S}
    for module in [module for name, module in sys.modules.items() if name.startswith(kit)]:
        for name, seconds in short.items():
            if hasattr(module, name):
                patch.setattr(module, name, seconds)
    for function in vars(Sync).values():
        if getattr(function, "__defaults__", None) == (kit_s,):
            patch.setattr(function, "__defaults__", (LONG_S,))
    patch.setattr(f"{kit}checks.failures._IN_TIME", 1.0 + MOMENTS_S)
    patch.setattr(f"{kit}checks.hygiene._ROUNDS", ROUNDS)
    for name in ("passes", "peers", "revoking"):
        patch.setattr(f"{kit}checks.{name}._LARGE", LARGE)
