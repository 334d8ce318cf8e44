"""Owners in processes of their own: JSON commands and replies, a line each, over a Unix socket.

Run as ``owner_process.py <socket path>``. It forks a process for each connection, which saves the
seconds that importing torch takes; no NIXL agent exists before the fork. It ends with its stdin.
UCX logs to stdout, so nothing is said there. Between commands an owner polls its endpoint, unless
told not to.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.pull import PullTrainer
from vllm_wt.source import StateDictSource
from vllm_wt_rdma import info, nixl
from vllm_wt_rdma.transport import NixlTransport

_POLL_S = 0.001
_LONG_S = 30.0


def content(nbytes: int, seed: int) -> torch.Tensor:
    """The bytes that a buffer holds; the reader makes the same to compare."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Owner:
    """Carries out the commands; each is a method."""

    def __init__(self, name: str) -> None:
        self.transport = NixlTransport(name, torch.device("cpu"))
        self.polling = True
        self._regions: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._trainer: PullTrainer | None = None

    def progress(self) -> None:
        self.transport.progress()
        if self._trainer is not None and self._trainer._transport is not None:
            self._trainer._transport.progress()

    def connect(self, nbytes: int) -> dict[str, Any]:
        """Be a trainer of one tensor; returns the init info."""
        self._weights = {"weight": torch.zeros(nbytes, dtype=torch.uint8)}
        self._trainer = PullTrainer(
            StateDictSource(self._weights), backend="rdma", transport_cls=NixlTransport
        )
        return self._trainer.describe(Deadline(_LONG_S)).to_wire()

    def publish(self, version: int) -> dict[str, Any]:
        """Publish values that are made of the version; returns the info that opens the round."""
        assert self._trainer is not None
        weight = self._weights["weight"]
        weight.copy_(content(weight.numel(), version))
        deadline = Deadline(_LONG_S)
        self._trainer.publish(version, deadline)
        self._trainer.send(1, deadline, lambda: None)
        return self._trainer.update_info("open", deadline, known=0).to_wire()

    def expose(self, generation: int, sizes: list[int], seed: int) -> str:
        """Expose new buffers of these sizes; returns the handle."""
        buffers = [content(nbytes, seed + index) for index, nbytes in enumerate(sizes)]
        region = self.transport.register(buffers)
        self._regions[generation] = (region, buffers)
        return self.transport.expose(region, generation).decode()

    def set_piece(self, nbytes: int) -> None:
        """Most bytes of a registration from here on."""
        info.PIECE_BYTES = nbytes

    def refill(self, generation: int, seed: int) -> None:
        """New values in the same memory."""
        for index, buffer in enumerate(self._regions[generation][1]):
            buffer.copy_(content(buffer.numel(), seed + index))

    def revoke(self, generation: int) -> None:
        self.transport.revoke(generation)

    def drop(self, generation: int) -> None:
        """Unregister a region, as an owner does whose memory has moved."""
        region, _ = self._regions.pop(generation)
        self.transport.unregister(region)

    def register_twice(self) -> None:
        """The same memory twice in one region: tied weights."""
        buffer = torch.ones(100, dtype=torch.uint8)
        self.transport.unregister(self.transport.register([buffer, buffer]))

    def poll(self, on: bool) -> None:
        self.polling = on

    def reported(self, ticket: int) -> dict[str, Any]:
        return {
            "readers": sorted(self.transport.readers(ticket)),
            "garbage": self.transport.garbage,
        }


def serve(connection: socket.socket) -> None:
    """Be one owner until the other end hangs up."""
    lines, replies = connection.makefile("r"), connection.makefile("w")
    environment, name = json.loads(lines.readline())
    os.environ.update(environment)
    owner = Owner(name)
    print(json.dumps(os.getpid()), file=replies, flush=True)
    while True:
        if owner.polling:
            owner.progress()
        if not select.select([connection], [], [], _POLL_S)[0]:
            continue
        line = lines.readline()
        if not line:
            break
        command, arguments = json.loads(line)
        print(json.dumps(getattr(owner, command)(**arguments)), file=replies, flush=True)
    owner.transport.close()


def main() -> None:
    nixl.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed owners leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
