"""Owners in processes of their own: JSON commands and replies, a line each, over a Unix socket.

Run as ``owner_process.py <socket path>``. It forks a process for each connection, which saves the
seconds that importing torch takes; no UCX worker exists before the fork. It ends with its stdin.
Between commands an owner polls its transport, unless told not to.
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

from vllm_wt_rdma.ucx import bindings
from vllm_wt_rdma.ucx.transport import UcxTransport

_POLL_S = 0.001


def content(nbytes: int, seed: int) -> torch.Tensor:
    """The bytes that a buffer holds; the reader makes the same to compare."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Owner:
    """Carries out the commands; each is a method."""

    def __init__(self, name: str) -> None:
        self.transport = UcxTransport(name, torch.device("cpu"))
        self.polling = True
        self._regions: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def expose(self, generation: int, sizes: list[int], seed: int) -> str:
        """Expose new buffers of these sizes; returns the handle."""
        buffers = [content(nbytes, seed + index) for index, nbytes in enumerate(sizes)]
        region = self.transport.register(buffers)
        self._regions[generation] = (region, buffers)
        return self.transport.expose(region, generation).decode()

    def refill(self, generation: int, seed: int) -> None:
        """New values in the same memory."""
        for index, buffer in enumerate(self._regions[generation][1]):
            buffer.copy_(content(buffer.numel(), seed + index))

    def revoke(self, generation: int) -> None:
        self.transport.revoke(generation)

    def free(self, generation: int) -> None:
        """Unregister a region and free its memory, as an owner does that offloads."""
        region, buffers = self._regions.pop(generation)
        self.transport.unregister(region)
        for buffer in buffers:
            buffer.untyped_storage().resize_(0)

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
            owner.transport.progress()
        if not select.select([connection], [], [], _POLL_S)[0]:
            continue
        line = lines.readline()
        if not line:
            break
        command, arguments = json.loads(line)
        print(json.dumps(getattr(owner, command)(**arguments)), file=replies, flush=True)
    owner.transport.close()


def main() -> None:
    bindings.load()
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
