"""What the two sides need of a fabric for collectives: broadcasts that can be given up."""

from __future__ import annotations

from typing import Protocol

import torch


class Broadcast(Protocol):
    """One under way."""

    def wait(self, seconds: float) -> bool:
        """Whether the buffer is free again on the root, and full elsewhere.

        Args:
            seconds: To wait for that; 0 for a look.

        Raises:
            PeerDead: A peer has gone.
            Timeout: It was not done within the deadline that it was started with.
            TransportError: The fabric failed in another way.
        """


class Communicator(Protocol):
    """The trainer, rank 0 and maybe the next ones, and the workers of all its engines."""

    def broadcast(self, buffer: torch.Tensor, seconds: float, root: int = 0) -> Broadcast:
        """Start to send one rank's buffer to all others'. All ranks call it in the same order.

        Args:
            buffer: Contiguous, uint8, of the same size on all ranks. It belongs to the broadcast until
                that is done; what was queued on it before, on the current stream, is waited for.
            seconds: After these the fabric gives it up by itself.
            root: Whose buffer is sent.
        """

    def close(self) -> bool:
        """Give everything up; whether nothing is written to any buffer any more."""
