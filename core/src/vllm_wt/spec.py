"""What a backend package says of itself. Import-light: plugin modules import this and no more."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

CONTRACT_VERSION = 1
"""Raised when a change of the contract breaks existing backends."""

_FORMS = ("transport", "worker", "trainer", "native")
_FUNCTIONS = ("doctor", "planner")
_PATHS = (*_FORMS, "baseline", *_FUNCTIONS)
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
AUTO = "auto"
"""As the option ``transport=``: the first of a backend's transports whose libraries are installed."""
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kind(enum.Enum):
    """The three kinds of backend. One of the first two may have a native engine in addition."""

    TRANSPORT = "transport"
    """One-sided: a `vllm_wt.transport.Transport`; core's pull engine does the rest."""
    ENGINE = "engine"
    """A `WeightTransferEngine` and a `TrainerWeightTransferEngine` of the package's own."""
    NATIVE = "native"
    """A `vllm_wt.native.WeightTransferEngine` alone: driven by vLLM's four calls, not `WeightSync`."""


_NEEDED = {
    Kind.TRANSPORT: {"transport"},
    Kind.ENGINE: {"worker", "trainer"},
    Kind.NATIVE: {"native"},
}
"""What each kind must name."""


class Capability(enum.Enum):
    """What a backend may be able to do; `vllm-wt check` holds it to what it claims.

    A backend claims a capability, or declares it unsupported with the reason. What it does neither
    of is undeclared: nothing is known. Clause numbers are those of docs/contract.md.
    """

    CPU = "cpu"
    """Moves tensors in host memory."""
    CUDA = "cuda"
    """Moves tensors in the memory of CUDA devices (WT-27)."""
    MULTI_HOST = "multi-host"
    """Trainer and workers may be on different hosts (WT-28)."""
    ZERO_COPY = "zero-copy"
    """The trainer's memory is read where it is: serving takes no second copy of it (WT-26)."""
    MANY_READERS = "many-readers"
    """Several workers receive the same publish: engines at tensor parallel 2 or more (WT-24, WT-48)."""
    MANY_OWNERS = "many-owners"
    """One plan reads from several owners, each with a part of the model (WT-25)."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """Answer of the hook ``vllm_wt_backend``.

    Args:
        name: Backend name; must equal the entry point's name. Lower case letters, digits, - and _.
        kind: See :class:`Kind`.
        transport: ``"package.module:Class"`` of the Transport (kind TRANSPORT).
        transports: Where there are several, all of them by the value of the option ``transport=``
            that takes them, ``transport``, the default, among them. A class may have a static method
            ``require()``, which raises BackendUnavailable where its libraries are missing.
        worker: ``"package.module:Class"`` of the worker engine (kind ENGINE).
        trainer: ``"package.module:Class"`` of the trainer engine (kind ENGINE).
        native: ``"package.module:Class"`` of an engine in vLLM's own form (kind NATIVE; optional for
            the others: what has no session at init goes to it).
        baseline: ``"package.module:Class"`` of a `vllm_wt.cli.bench.Baseline`: the fabric without
            us, for ``vllm-wt bench wire``.
        baselines: Those of ``transports`` that are others, by the same names.
        doctor: ``"package.module:function"`` that yields a `vllm_wt.cli.doctor.finding.Finding` for
            each check of the fabric; ``vllm-wt doctor`` calls it in a process of its own.
        planner: ``"package.module:function"``, a `vllm_wt.cli.plan_source.SourcePlanner`: who sends
            what to whom, for ``vllm-wt plan --source``.
        benchmarks: Benchmarks of the package's own, by the name that ``vllm-wt bench`` knows them by:
            ``"package.module:function"`` of a `vllm_wt.cli.bench.Benchmark`.
        capabilities: What the backend claims to be able to do.
        unsupported: What it declares that it cannot do, each with the reason in a few words.
        summary: One line for ``vllm-wt list``.
        contract: The contract version it was written against; name it, so that a core with another
            one refuses the backend instead of breaking in it.

    Raises:
        ValueError: A field does not have the form above.
    """

    name: str
    kind: Kind
    transport: str | None = None
    worker: str | None = None
    trainer: str | None = None
    native: str | None = None
    baseline: str | None = None
    doctor: str | None = None
    planner: str | None = None
    transports: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    baselines: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    benchmarks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    capabilities: frozenset[Capability] = frozenset()
    unsupported: Mapping[Capability, str] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    summary: str = ""
    contract: int = 1  # whatever CONTRACT_VERSION is: a package that names none is of the first

    def __post_init__(self) -> None:
        self._check_types()
        if self.contract != CONTRACT_VERSION:
            raise ValueError(
                f"backend {self.name!r} was written against contract {self.contract}, "
                f"this vllm-wt has {CONTRACT_VERSION}; install a matching release of it"
            )
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"backend name {self.name!r} does not match {_NAME.pattern}")
        if self.name.startswith("wt_"):
            raise ValueError(f"backend name {self.name!r}: wt_ is how vLLM spells our names")
        if not isinstance(self.kind, Kind):
            raise ValueError(f"backend {self.name!r} has kind {self.kind!r}, which is no Kind")
        wanted = _NEEDED[self.kind]
        for name in _FORMS:
            path = getattr(self, name)
            if (name in wanted) if path is None else (name not in {*wanted, "native"}):
                raise ValueError(
                    f"backend {self.name!r} of kind {self.kind.value} needs exactly "
                    f"{sorted(wanted)}, got {name}={path!r}"
                )
        for name in _PATHS:
            path = getattr(self, name)
            if path is not None and not _PATH.fullmatch(path):
                form = "function" if name in _FUNCTIONS else "Class"
                raise ValueError(f"{name}={path!r} is not of the form 'package.module:{form}'")
        self._check_named_paths()
        self._check_capabilities()

    def _check_types(self) -> None:
        expected: dict[str, Any] = {
            "name": str,
            "summary": str,
            "contract": int,
            "unsupported": Mapping,
            "transports": Mapping,
            "baselines": Mapping,
            "benchmarks": Mapping,
            "capabilities": (frozenset, set, list, tuple),
        }
        expected |= {path: (str, type(None)) for path in _PATHS}
        for field_, types in expected.items():
            value = getattr(self, field_)
            if not isinstance(value, types):
                raise ValueError(
                    f"backend {self.name!r} has {field_}={value!r}, a {type(value).__name__}"
                )
        object.__setattr__(self, "capabilities", frozenset(self.capabilities))
        for name in ("unsupported", "transports", "baselines", "benchmarks"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def _check_named_paths(self) -> None:
        for title in ("transports", "baselines", "benchmarks"):
            paths: Mapping[Any, Any] = getattr(self, title)
            for name, path in paths.items():
                if not (isinstance(name, str) and _NAME.fullmatch(name)) or name == AUTO:
                    raise ValueError(f"{title} has a name {name!r}; {_NAME.pattern}, not {AUTO!r}")
                if not (isinstance(path, str) and _PATH.fullmatch(path)):
                    form = "function" if title == "benchmarks" else "Class"
                    raise ValueError(
                        f"{title}[{name!r}]={path!r} is not of the form 'package.module:{form}'"
                    )
        if self.transports and self.transport not in self.transports.values():
            raise ValueError(
                f"backend {self.name!r} has transport={self.transport!r}, which is none of its "
                f"transports {sorted(self.transports.values())}"
            )
        if unknown := sorted(set(self.baselines) - set(self.transports)):
            raise ValueError(f"backend {self.name!r} has baselines of no transport: {unknown}")

    def _check_capabilities(self) -> None:
        reasons: Mapping[Capability, Any] = self.unsupported
        for one in (*self.capabilities, *self.unsupported):
            if not isinstance(one, Capability):
                raise ValueError(
                    f"backend {self.name!r} has a capability {one!r}, which is none of "
                    f"{', '.join(str(known) for known in Capability)}"
                )
        for one, reason in reasons.items():
            if one in self.capabilities:
                raise ValueError(f"backend {self.name!r} claims {one} and declares it unsupported")
            if not isinstance(reason, str) or not reason.strip():
                raise ValueError(f"backend {self.name!r} gives no reason why it does not do {one}")
