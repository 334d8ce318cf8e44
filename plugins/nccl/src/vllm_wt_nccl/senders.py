"""The communicators of a worker: one with each rank of the trainer that sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_wt_nccl.communicator import Broadcast, Communicator


class SendersCommunicator:
    """A `vllm_wt_nccl.communicator.Communicator` whose roots are the senders.

    Each rank of the trainer has one of its own, with all workers: it gets nothing that the others send,
    and they send at the same time.

    Args:
        of: That of each sender.
    """

    def __init__(self, of: Mapping[int, Communicator]) -> None:
        self._of = of

    def broadcast(
        self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0
    ) -> Broadcast:
        return self._of[root].broadcast(buffers, seconds)

    def close(self) -> bool:
        closed = {sender: each.close() for sender, each in self._of.items()}
        return all(closed.values())
