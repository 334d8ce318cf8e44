"""Under which names the two sides of the native form leave what is of no round; see `Keys` for that."""

from __future__ import annotations

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
