"""Discovery of backend packages through the entry-point group ``vllm.weight_transfer``.

Entry points are loaded one by one, so that a broken package is reported and takes nobody down.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any

import pluggy

from vllm_wt import hookspecs
from vllm_wt.errors import BackendUnavailable, PluginError
from vllm_wt.spec import BackendSpec

GROUP = "vllm.weight_transfer"
VLLMS_OWN = frozenset({"ipc", "modelexpress", "nccl", "nccl_m2n", "sharded_rdt", "sparse_nccl"})
"""Backends that vLLM itself has, in some release of 0.25 to 0.33."""
ALLOW_LIST = "VLLM_WT_PLUGINS"
"""Environment variable: comma-separated backend names to load; unset loads all, empty loads none."""


@dataclass(frozen=True)
class Backend:
    """A backend that was found and answered its hook."""

    spec: BackendSpec
    distribution: str
    version: str


@dataclass(frozen=True)
class Failure:
    """An entry point that could not be used, and why."""

    name: str
    distribution: str
    version: str
    error: str
    cure: str


@dataclass
class Registry:
    """All backends of this environment, and the ones that failed to load."""

    backends: dict[str, Backend] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    left_out: frozenset[str] = frozenset()
    """Names that the allow-list leaves out."""
    hooks: pluggy.PluginManager = field(
        default_factory=lambda: pluggy.PluginManager(hookspecs.PROJECT)
    )

    def get(self, name: str) -> Backend:
        """The backend called ``name`` (``wt_<name>``, vLLM's spelling of it, works as well).

        Raises:
            PluginError: The package is installed but broken.
            BackendUnavailable: No package provides it.
        """
        short = name.removeprefix("wt_")
        if short in self.backends:
            return self.backends[short]
        for failure in self.failures:
            if failure.name == short:
                raise PluginError(
                    f"Backend {short!r} of {failure.distribution} {failure.version} "
                    f"cannot be used: {failure.error}",
                    backend=short,
                    cure=failure.cure,
                )
        raise BackendUnavailable(
            f"There is no backend {short!r}",
            backend=short,
            expected=f"one of {sorted(self.backends)}",
            cure=self._cure(short),
        )

    def add(self, backend: Backend) -> None:
        """Take in a backend that was registered in code; the same class again changes nothing.

        Raises:
            PluginError: Another one has its name.
        """
        spec = backend.spec
        known = self.backends.setdefault(spec.name, backend)
        if known.spec.native != spec.native:
            raise PluginError(
                f"The name {spec.name!r} is taken by {known.distribution} {known.version}",
                backend=spec.name,
                where="register_engine",
                got=spec.native,
                cure="choose another name",
            )

    def _cure(self, name: str) -> str:
        if name in self.left_out:
            return f"name it in {ALLOW_LIST}, or unset that"
        if name in VLLMS_OWN:
            return (
                f"choose one of these; {name!r} is a backend of vLLM's own, not driven by vllm-wt"
            )
        near = difflib.get_close_matches(name, self.backends, 1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        return (
            f"{guess}`vllm-wt list` shows what is installed; each backend comes in a package of its "
            "own, this project's as vllm-wt-<name>"
        )


def load(entry_points: Iterable[metadata.EntryPoint] | None = None) -> Registry:
    """Load every backend of the group, or of ``entry_points`` when given.

    Never raises for a broken package: each failure is kept in :attr:`Registry.failures`.
    """
    registry = Registry()
    registry.hooks.add_hookspecs(hookspecs)
    found = list(metadata.entry_points(group=GROUP) if entry_points is None else entry_points)
    allowed = os.environ.get(ALLOW_LIST)
    if allowed is not None:
        wanted = {name.strip() for name in allowed.split(",")}
        registry.left_out = frozenset(point.name for point in found) - wanted
        found = [point for point in found if point.name in wanted]
    owners = Counter(point.name for point in found)
    for point in sorted(found, key=lambda point: point.name):
        distribution, version = _owner(point)
        if owners[point.name] > 1:
            names = sorted({_owner(other)[0] for other in found if other.name == point.name})
            registry.failures.append(
                Failure(
                    point.name,
                    distribution,
                    version,
                    f"the name {point.name!r} is claimed by {' and '.join(names)}",
                    f"uninstall all but one of {', '.join(names)}",
                )
            )
            continue
        try:
            spec = _load_one(registry.hooks, point)
        except (Exception, SystemExit) as error:  # a package may try to leave on import
            registry.failures.append(
                Failure(
                    point.name,
                    distribution,
                    version,
                    f"{type(error).__name__}: {error}",
                    _cure(error, distribution),
                )
            )
            continue
        registry.backends[point.name] = Backend(spec, distribution, version)
    return registry


@lru_cache(maxsize=1)
def default() -> Registry:
    """The registry of this process, loaded at first use."""
    return load()


def resolve(path: str, *, backend: str) -> Any:
    """Import ``"package.module:Class"``.

    Raises:
        BackendUnavailable: Its code cannot be imported here.
        PluginError: The module has no such class.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a library that is missing is an OSError, say
        raise BackendUnavailable(
            f"The code of backend {backend!r} cannot be imported: {error}",
            backend=backend,
            where=module_name,
            cure=f"pip install vllm-wt-{backend} (with the dependency named above)",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PluginError(
            f"Backend {backend!r} names a class that does not exist",
            backend=backend,
            expected=path,
            cure="install a fixed release of the package",
        ) from error


def _owner(point: metadata.EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist else ("unknown", "?")


def _load_one(hooks: pluggy.PluginManager, point: metadata.EntryPoint) -> BackendSpec:
    if not point.pattern.match(point.value):
        raise ValueError(f"its entry point {point.value!r} is no module")
    module = point.load()
    if (other := hooks.get_name(module)) is not None:
        raise ValueError(f"it is the same module as the entry point {other!r}")
    try:
        hooks.register(module, name=point.name)
        hooks.check_pending()
        answers = hooks.subset_hook_caller(
            "vllm_wt_backend",
            remove_plugins=[
                other for name, other in hooks.list_name_plugin() if other is not module
            ],
        )()
        if len(answers) != 1 or not isinstance(answers[0], BackendSpec):
            raise TypeError(f"vllm_wt_backend() must return one BackendSpec, got {answers!r}")
        if answers[0].name != point.name:
            raise ValueError(
                f"entry point {point.name!r} describes a backend called {answers[0].name!r}"
            )
    except BaseException:
        # By name: a module that failed half-way through is known by nothing else to pluggy 1.5.
        if hooks.has_plugin(point.name):
            hooks.unregister(name=point.name)
        raise
    return answers[0]


def _cure(error: BaseException, distribution: str) -> str:
    if isinstance(error, ImportError):
        return f"install what {distribution} misses, or pip uninstall {distribution}"
    return f"pip install --upgrade {distribution}, or pip uninstall {distribution}"
