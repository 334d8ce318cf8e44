"""Owners and readers in processes of their own: lines of JSON, commands and replies, over a socket.

Run as ``owner_process.py <socket path>``. It forks a process for each connection, which saves the
seconds that importing torch takes. It ends with its stdin. Between commands an endpoint polls its
transport, unless told not to.
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
from vllm_wt.errors import WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_nccl.p2p.transport import P2pTransport

_POLL_S = 0.001
_LONG_S = 30.0


def content(nbytes: int, seed: int) -> torch.Tensor:
    """The bytes that a buffer holds; the reader makes the same to compare."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Endpoint:
    """An owner or a reader. Carries out the commands; each is a method."""

    def __init__(self, name: str, device: str) -> None:
        self._device = torch.device(device)
        self.transport = P2pTransport(name, self._device)
        self.polling = True
        self._regions: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def expose(self, generation: int, sizes: list[int], seed: int) -> str:
        """Expose new buffers of these sizes; returns the handle."""
        buffers = [content(n, seed + index).to(self._device) for index, n in enumerate(sizes)]
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

    def held(self) -> int:
        """Of how many buckets copies are prepared, which hold memory that was exposed."""
        sessions = self.transport._owner._sessions
        plans = [plan for session in sessions for plan in session._plans.values()]
        return sum(len(plan._moves) for plan in plans)

    def lose(self, generation: int) -> None:
        """Free the memory of a region that readers may read, as an owner must not."""
        for buffer in self._regions[generation][1]:
            buffer.untyped_storage().resize_(0)

    def poll(self, on: bool) -> None:
        self.polling = on

    def fork(self) -> int:
        """Have a child that outlives this process, as a loader of data may; its pid."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child

    def open(self, owner: str, handle: str, nbytes: int) -> None:
        """Be a reader of all of an owner's one buffer."""
        self._target = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self.transport.open(owner, 1, handle.encode(), Deadline(_LONG_S))
        region = self.transport.register([self._target])
        self._plan = self.transport.prepare(region, [Copy(owner, 0, 0, 0, 0, nbytes)])

    def read(self, seed: int) -> bool:
        """A pass; whether all of it is right."""
        self._running = self.transport.submit(self._plan)
        return self.finish(seed)

    def finish(self, seed: int) -> bool:
        """Go on to the end of the pass; whether all of it is right."""
        deadline = Deadline(_LONG_S)
        while not self.transport.poll(self._running).done:
            deadline.check("The pass has not ended")
        return torch.equal(self._target.cpu(), content(self._target.numel(), seed))

    def begin(self, until: int) -> int:
        """Begin a pass, and have at least so many bytes of it land; how many have."""
        self._running, landed = self.transport.submit(self._plan), 0
        while landed < until:
            landed = self.transport.poll(self._running).nbytes
        return landed

    def cancel(self) -> bool:
        return self.transport.cancel(self._running)

    def fabric(self, owner: str) -> str:
        """What carries an owner's bytes."""
        return self.transport._opened[owner].fabric.name

    def notify(self, owner: str, ticket: int) -> None:
        self.transport.notify(owner, ticket)

    def reported(self, ticket: int) -> dict[str, Any]:
        return {
            "readers": sorted(self.transport.readers(ticket)),
            "garbage": self.transport.garbage,
        }


def serve(connection: socket.socket) -> None:
    """Be one endpoint until the other end hangs up."""
    lines, replies = connection.makefile("r"), connection.makefile("w")
    name, device, environment = json.loads(lines.readline())
    os.environ.update(environment)
    endpoint = Endpoint(name, device)
    print(json.dumps({"result": os.getpid()}), file=replies, flush=True)
    while True:
        if endpoint.polling:
            endpoint.transport.progress()
        if not select.select([connection], [], [], _POLL_S)[0]:
            continue
        line = lines.readline()
        if not line:
            break
        command, arguments = json.loads(line)
        try:
            reply = {"result": getattr(endpoint, command)(**arguments)}
        except WeightTransferError as error:
            reply = {"error": error.facts()}
        print(json.dumps(reply), file=replies, flush=True)
    endpoint.transport.close()


def main() -> None:
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
