"""How many pairs may have a GPU at a time."""

from __future__ import annotations

MOST_PAIRS = 8
"""A kernel of NCCL's stays on its GPU until its peer's runs. If more of them wait than a GPU has room
for, each for one that does not get on its own GPU, none ever ends. Of pairs that have 8 blocks each, 8
that send and 8 that receive fit on every GPU that NCCL is at home on."""


class Turns:
    """Who has one.

    Args:
        most: At a time.
    """

    def __init__(self, most: int = MOST_PAIRS) -> None:
        self._most = most
        self._those: set[object] = set()

    def take(self, who: object) -> bool:
        """Whether somebody has a turn now; it stays his until he gives it back."""
        if who not in self._those and len(self._those) >= self._most:
            return False
        self._those.add(who)
        return True

    def give_back(self, who: object) -> None:
        self._those.discard(who)
