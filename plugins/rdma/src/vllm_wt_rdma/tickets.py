"""Which readers have reported which ticket."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_MESSAGE = re.compile(rb"([\w.:-]{1,128})\|(0|[1-9][0-9]{0,18})", re.ASCII)
_KEPT = 8
"""Tickets remembered; late reports of older ones are of no use to anybody."""
_MAX_READERS = 1 << 16


def message(reader: str, ticket: int) -> bytes:
    """What a reader sends."""
    return f"{reader}|{ticket}".encode()


class Tickets:
    """Collects reports.

    Attributes:
        garbage: How many messages were none of ours.
    """

    def __init__(self) -> None:
        self.garbage = 0
        self._readers: dict[int, set[str]] = {}

    def add(self, messages: Mapping[str, Iterable[bytes]]) -> None:
        """Take in what NIXL received, by sender."""
        for sender, texts in messages.items():
            for text in texts:
                match = _MESSAGE.fullmatch(text)
                if match is None or match[1].decode() != sender:
                    self.garbage += 1
                    continue
                readers = self._readers.setdefault(int(match[2]), set())
                if len(readers) < _MAX_READERS:
                    readers.add(sender)
                if len(self._readers) > _KEPT:
                    del self._readers[min(self._readers)]

    def readers(self, ticket: int) -> frozenset[str]:
        return frozenset(self._readers.get(ticket, ()))
