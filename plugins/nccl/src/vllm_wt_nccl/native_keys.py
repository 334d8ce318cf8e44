"""Under which names the two sides of the native form leave what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass

SESSION = "native"
"""Before all of them, in whichever trainer's store."""

TRAINER, MEMBERS, CAME = "trainer", "members", "came"
"""Who has come, and how many."""
CLOSED, GO, MADE, COMPLETE = "closed", "go", "made", "complete"
"""Nobody else is let in; who is; how many have the communicator; all have."""
FAILED, HEARD = "failed", "heard"
"""Why there will be no group; how many know."""
ROUND, OVER = "round", "over"
"""Number of the last round that the trainer has begun; why the group is no more."""


@dataclass(frozen=True)
class Keys:
    """What is left for one round.

    Args:
        ticket: Its number.
    """

    ticket: int

    @property
    def here(self) -> str:
        """How many workers take part."""
        return f"{self.ticket}/here"

    @property
    def call(self) -> str:
        """That all do, and broadcasts begin."""
        return f"{self.ticket}/call"

    @property
    def rows(self) -> str:
        """What is in each parcel, a line for each, for whoever finds one wrong."""
        return f"{self.ticket}/rows"

    @property
    def done(self) -> str:
        """How many workers have everything."""
        return f"{self.ticket}/done"

    @property
    def failed(self) -> str:
        """The facts of an error, once somebody has failed."""
        return f"{self.ticket}/failed"

    @property
    def all(self) -> tuple[str, ...]:
        return (self.here, self.call, self.rows, self.done, self.failed)
