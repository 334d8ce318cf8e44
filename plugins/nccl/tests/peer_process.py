"""A peer in a process of its own: does what its input says, line by line, and answers each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt_nccl.fabrics import opened
from vllm_wt_nccl.quarantine import give_up
from vllm_wt_nccl.rendezvous import Rendezvous

HOST = "127.0.0.1"
SESSION = "session"


class Peer:
    """A side of a rendezvous, and a rank of a communicator.

    Args:
        device: Of its buffers.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def host(self) -> int:
        self._rendezvous = Rendezvous.host(SESSION, HOST, 0, Deadline(30))
        return self._rendezvous.port

    def join(self, port: int) -> None:
        self._rendezvous = Rendezvous.join(SESSION, HOST, port, Deadline(30))

    def put(self, key: str, value: str) -> None:
        self._rendezvous.put(key, value, Deadline(30))

    def meet(self, rank: int, size: int, seconds: float, group: str = "group") -> None:
        store = self._rendezvous.apart(group, Deadline(30))
        self._communicator = opened(store, rank, size, HOST, self._device, seconds)

    def delay(self) -> None:
        """What is queued on the GPU next waits for about a tenth of a second."""
        torch.cuda._sleep(200_000_000)

    def start(self, nbytes: int, value: int, seconds: float, root: int = 0) -> None:
        """A broadcast, of this rank's part in it."""
        self._buffer = torch.full((nbytes,), value, dtype=torch.uint8, device=self._device)
        self._broadcast = self._communicator.broadcast([self._buffer], seconds, root)

    def finish(self, seconds: float) -> list[int]:
        """Wait for it; the least and the largest byte that have come."""
        deadline = Deadline(seconds)
        while not self._broadcast.wait(0.01):
            deadline.check("the broadcast is not done")
        return [int(self._buffer.min()), int(self._buffer.max())]

    def close(self) -> bool:
        return self._communicator.close()

    def give_up(self) -> bool:
        communicator = self._communicator
        del self._communicator, self._broadcast
        return give_up(communicator)

    def files(self) -> int:
        """How many this process has open."""
        return len(os.listdir("/proc/self/fd"))


def main() -> None:
    peer = Peer(sys.argv[1])
    for line in sys.stdin:
        method, arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(peer, method)(*arguments)}
        except WeightTransferError as error:
            answer = {"error": error.facts()}
        print(json.dumps(answer), flush=True)


main()
