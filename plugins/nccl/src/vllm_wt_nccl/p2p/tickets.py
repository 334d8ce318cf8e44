"""Which readers have reported which ticket."""

from __future__ import annotations

_KEPT = 8
"""Tickets remembered; late reports of older ones are of no use to anybody."""
_MAX_READERS = 1 << 16


class Tickets:
    """Collects reports."""

    def __init__(self) -> None:
        self._readers: dict[int, set[str]] = {}

    def add(self, reader: str, ticket: int) -> None:
        readers = self._readers.setdefault(ticket, set())
        if len(readers) < _MAX_READERS:
            readers.add(reader)
        if len(self._readers) > _KEPT:
            del self._readers[min(self._readers)]

    def readers(self, ticket: int) -> frozenset[str]:
        return frozenset(self._readers.get(ticket, ()))
