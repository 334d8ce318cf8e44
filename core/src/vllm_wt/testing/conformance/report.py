"""The closing report: what was claimed, what was checked, what came out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vllm_wt.registry import Backend
from vllm_wt.spec import CONTRACT_VERSION, Capability
from vllm_wt.testing.conformance.gate import CHECK, not_here
from vllm_wt.testing.conformance.suite import BackendConformance


@dataclass
class Report:
    """Of one backend.

    Args:
        installed: The backend.
        device: That the checks ran on.
        transport: Which of the backend's Transports; empty for the default.
    """

    installed: Backend
    device: str
    transport: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    """``passed``, ``failed``, ``known failure`` or ``not run``, by check."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a check was not run, or is known to fail."""
    seconds: float = 0.0

    def add(self, check: str, phase: pytest.TestReport) -> None:
        """Take in set-up, call or clean-up of a check."""
        self.seconds += phase.duration
        if phase.outcome == "failed":
            self.outcomes[check] = "failed"
        elif phase.outcome == "skipped" and hasattr(phase, "wasxfail"):
            self.outcomes[check] = "known failure"
            self.reasons[check] = phase.wasxfail.removeprefix("reason: ")
        elif phase.outcome == "skipped":
            self.outcomes[check] = "not run"
            self.reasons[check] = _reason(phase.longrepr)
        elif phase.when == "call":
            self.outcomes[check] = "passed"

    def capabilities(self) -> dict[str, str]:
        """What each is: claimed and checked, claimed only, unsupported, or undeclared."""
        spec = self.installed.spec
        said = {}
        for one in Capability:
            if one in spec.unsupported:
                said[one.value] = f"unsupported: {spec.unsupported[one]}"
            elif one not in spec.capabilities:
                said[one.value] = "undeclared"
            elif why := not_here(one):
                said[one.value] = f"claimed, not checked: {why}"
            else:
                said[one.value] = "claimed"
        return said

    def left_out(self) -> set[str]:
        """Checks of the kit that this run did not take in."""
        return all_checks() - set(self.outcomes)

    def count(self, outcome: str) -> int:
        return sum(other == outcome for other in self.outcomes.values())

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON-safe data."""
        spec = self.installed.spec
        return {
            "backend": spec.name,
            "transport": self.transport,
            "kind": spec.kind.value,
            "distribution": self.installed.distribution,
            "version": self.installed.version,
            "kit": metadata.version("vllm-wt"),
            "contract": CONTRACT_VERSION,
            "device": self.device,
            "capabilities": self.capabilities(),
            "claimed": len(spec.capabilities),
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "known_failures": self.count("known failure"),
            "not_run": self.count("not run"),
            "not_selected": len(self.left_out()),
            "checks": dict(sorted(self.outcomes.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "seconds": round(self.seconds, 2),
        }

    def _kind(self) -> str:
        kind = self.installed.spec.kind.value
        return f"{kind} {self.transport}" if self.transport else kind

    def lines(self) -> list[str]:
        """The same, for people."""
        facts = self.facts()
        lines = [
            f"{facts['backend']} ({facts['distribution']} {facts['version']}, {self._kind()}) on "
            f"{self.device}, by the kit of vllm-wt {facts['kit']}, contract {CONTRACT_VERSION}",
            f"capabilities: claimed {facts['claimed']} of {len(Capability)}",
            *(f"  {name}: {said}" for name, said in facts["capabilities"].items()),
            f"checks: {facts['passed']} passed, {facts['failed']} failed, "
            f"{facts['known_failures']} known failures, {facts['not_run']} not run, "
            f"{facts['not_selected']} not selected, in {facts['seconds']:.0f} s",
        ]
        for outcome in ("failed", "known failure", "not run"):
            for check in sorted(c for c, other in self.outcomes.items() if other == outcome):
                why = f": {self.reasons[check]}" if check in self.reasons else ""
                lines.append(f"  {outcome}: {check}{why}")
        return lines


def all_checks() -> set[str]:
    """Names of all checks of the kit."""
    return {name for name in dir(BackendConformance) if name.startswith(CHECK)}


def write(reports: list[Report], path: Path) -> None:
    """One JSON object, or a list of them for several backends."""
    facts = [report.facts() for report in reports]
    path.write_text(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2) + "\n")


def _reason(longrepr: Any) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ")
