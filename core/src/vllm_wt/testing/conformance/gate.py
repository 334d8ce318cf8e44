"""Which checks a backend is held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vllm_wt.spec import BackendSpec, Capability, Kind

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

UNCHECKED = {Capability.MULTI_HOST: "the kit has one host"}
"""Capabilities that no check can tell of on any host, and why (WT-28)."""
CHECK = "test_"
"""What the name of a check begins with."""
_CAPABILITY = "wt_capability"
_KIND = "wt_kind"
_MAPS = "wt_maps"
_PACKAGE = "wt_package"


def needs(capability: Capability) -> Callable[[F], F]:
    """A check for backends that claim a capability."""

    def mark(check: F) -> F:
        setattr(check, _CAPABILITY, capability)
        return check

    return mark


def of_the_package(checks: C) -> C:
    """A class of checks for all backends, those too that have no side for `WeightSync`."""
    for name, check in vars(checks).items():
        if name.startswith(CHECK):
            setattr(check, _PACKAGE, True)
    return checks


def transports_only(checks: C) -> C:
    """A class of checks for backends of kind TRANSPORT."""
    for name, check in vars(checks).items():
        if name.startswith(CHECK):
            setattr(check, _KIND, Kind.TRANSPORT)
    return checks


def mapping_only(checks: C) -> C:
    """A class of checks for Transports that are a `vllm_wt.transport.MappingTransport`."""
    for name, check in vars(checks).items():
        if name.startswith(CHECK):
            setattr(check, _MAPS, True)
    return transports_only(checks)


def is_of_mapping(check: Any) -> bool:
    return getattr(check, _MAPS, False)


def why_not(check: Any, spec: BackendSpec) -> str | None:
    """Why a backend is not held to a check; None when it is."""
    if spec.kind is Kind.NATIVE and not getattr(check, _PACKAGE, False):
        return "for backends that WeightSync drives: an engine in vLLM's own form has its own tests"
    kind = getattr(check, _KIND, None)
    if kind is not None and kind is not spec.kind:
        return f"for backends of kind {kind.value} only"
    wanted: Capability | None = getattr(check, _CAPABILITY, None)
    if wanted is None:
        return None
    if wanted in spec.capabilities:
        return not_here(wanted)
    why = spec.unsupported.get(wanted)
    return f"{wanted.value} is unsupported: {why}" if why else f"{wanted.value} is undeclared"


def not_here(capability: Capability) -> str | None:
    """Why a capability cannot be checked on this host; None when it can."""
    if capability is Capability.CUDA and not torch.cuda.is_available():
        return "this host has no CUDA device"
    return UNCHECKED.get(capability)
