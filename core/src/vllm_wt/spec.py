"""What a backend package says of itself. Import-light: plugin modules import this and no more."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

CONTRACT_VERSION = 1
"""Raised when a change of the contract breaks existing backends."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kind(enum.Enum):
    """The two kinds of backend."""

    TRANSPORT = "transport"
    """One-sided: a `vllm_wt.transport.Transport`; core's pull engine does the rest."""
    ENGINE = "engine"
    """A `WeightTransferEngine` and a `TrainerWeightTransferEngine` of the package's own."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """Answer of the hook ``vllm_wt_backend``.

    Args:
        name: Backend name; must equal the entry point's name. Lower case letters, digits, - and _.
        kind: See :class:`Kind`.
        transport: ``"package.module:Class"`` of the Transport (kind TRANSPORT).
        worker: ``"package.module:Class"`` of the worker engine (kind ENGINE).
        trainer: ``"package.module:Class"`` of the trainer engine (kind ENGINE).
        baseline: ``"package.module:Class"`` of a `vllm_wt.cli.bench.Baseline`: the fabric without
            us, for ``vllm-wt bench wire``.
        doctor: ``"package.module:function"`` that yields a `vllm_wt.cli.doctor.finding.Finding` for
            each check of the fabric; ``vllm-wt doctor`` calls it in a process of its own.
        capabilities: Names of what the backend claims to support.
        summary: One line for ``vllm-wt list``.
        contract: The contract version it was written against.

    Raises:
        ValueError: A field does not have the form above.
    """

    name: str
    kind: Kind
    transport: str | None = None
    worker: str | None = None
    trainer: str | None = None
    baseline: str | None = None
    doctor: str | None = None
    capabilities: frozenset[str] = frozenset()
    summary: str = ""
    contract: int = CONTRACT_VERSION

    def __post_init__(self) -> None:
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
        wanted = {"transport"} if self.kind is Kind.TRANSPORT else {"worker", "trainer"}
        for field in ("transport", "worker", "trainer"):
            path = getattr(self, field)
            if (path is not None) != (field in wanted):
                raise ValueError(
                    f"backend {self.name!r} of kind {self.kind.value} needs exactly "
                    f"{sorted(wanted)}, got {field}={path!r}"
                )
        for field in ("transport", "worker", "trainer", "baseline", "doctor"):
            path = getattr(self, field)
            if path is not None and not _PATH.fullmatch(path):
                form = "function" if field == "doctor" else "Class"
                raise ValueError(f"{field}={path!r} is not of the form 'package.module:{form}'")
