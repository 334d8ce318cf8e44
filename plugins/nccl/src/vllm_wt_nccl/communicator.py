"""What the two sides need of a fabric for collectives: broadcasts that can be given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Broadcast(Protocol):
    """Some buffers under way together."""

    def wait(self, seconds: float) -> bool:
        """Whether the buffers are free again on the root, and full elsewhere.

        Args:
            seconds: To wait for that; 0 for a look.

        Raises:
            PeerDead: A peer has gone.
            Timeout: It was not done within the deadline that it was started with.
            TransportError: The fabric failed in another way.
        """


class Communicator(Protocol):
    """The trainer, rank 0 and maybe the next ones, and the workers of all its engines."""

    def broadcast(
        self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0
    ) -> Broadcast:
        """Start to send one rank's buffers to all others'. All ranks call it in the same order.

        Args:
            buffers: At least one; contiguous, uint8, of the same sizes on all ranks. They belong to the
                broadcast until that is done; what was queued on them before, on the current stream, is
                waited for.
            seconds: After these the fabric gives it up by itself.
            root: Whose buffers are sent.
        """

    def close(self) -> bool:
        """Give everything up; whether nothing is written to any buffer any more."""
