"""What a check found. Import-light: plugins' own checks yield these."""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("problem", "warning", "skipped", "ok")
"""Worst first, the order in which they are shown. Only a problem would stop a sync."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        id: Stable, in kebab-case; core puts a backend's name before those of its package.
        status: One of :data:`STATUSES`.
        found: What is there; for a skipped check why.
        cure: What to do about it; a problem always has one.
    """

    id: str
    status: str
    found: str
    cure: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {', '.join(STATUSES)}")
        if not all(isinstance(text, str) for text in (self.id, self.found, self.cure)):
            raise TypeError(f"a Finding consists of texts, got {self!r}")
        if self.status == "problem" and not self.cure:
            raise ValueError(f"problem {self.id!r} has no cure")
