"""Owners in processes of their own: JSON commands and replies, a line each, over a Unix socket.

Run as ``owner_process.py <socket path>``. It forks a process for each connection, which saves the
seconds that importing torch takes. It ends with its stdin. Between commands an owner polls its
endpoint, unless told not to.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_wt_ipc.transport import IpcTransport

_POLL_S = 0.001


def content(nbytes: int, seed: int) -> torch.Tensor:
    """The bytes that a buffer holds; the reader makes the same to compare."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def held() -> dict[str, int]:
    """What this process has in use."""
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def _shared_by_torch(values: torch.Tensor) -> torch.Tensor:
    return values.clone().share_memory_()


def _allocated(values: torch.Tensor) -> torch.Tensor:
    return IpcTransport.allocate(values.numel(), torch.device("cpu")).copy_(values)


def _views(values: torch.Tensor) -> torch.Tensor:
    """Behind an odd number of bytes of a larger allocation."""
    return _allocated(torch.cat([torch.zeros(77, dtype=torch.uint8), values]))[77:]


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "allocated": _allocated,
    "shared": _shared_by_torch,
    "views": _views,
}


class Owner:
    """Carries out the commands; each is a method."""

    def __init__(self, name: str) -> None:
        self.transport = IpcTransport(name, torch.device("cpu"))
        self.polling = True
        self._regions: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def expose(self, generation: int, sizes: list[int], seed: int, kind: str) -> str:
        """Expose new buffers of these sizes; returns the handle."""
        buffers = [MAKERS[kind](content(n, seed + index)) for index, n in enumerate(sizes)]
        region = self.transport.register(buffers)
        self._regions[generation] = (region, buffers)
        return self.transport.expose(region, generation).decode()

    def expose_one(self, generation: int, sizes: list[int], seed: int) -> str:
        """Expose buffers that lie behind each other in one allocation."""
        values = [content(nbytes, seed + index) for index, nbytes in enumerate(sizes)]
        buffers = list(_allocated(torch.cat(values)).split(sizes))
        region = self.transport.register(buffers)
        self._regions[generation] = (region, buffers)
        return self.transport.expose(region, generation).decode()

    def refill(self, generation: int, seed: int) -> None:
        """New values in the same memory."""
        for index, buffer in enumerate(self._regions[generation][1]):
            buffer.copy_(content(buffer.numel(), seed + index))

    def revoke(self, generation: int) -> None:
        self.transport.revoke(generation)

    def drop(self, generation: int) -> None:
        """Unregister a region and free its memory, as an owner does whose memory has moved."""
        region, _ = self._regions.pop(generation)
        self.transport.unregister(region)

    def close(self) -> None:
        self.transport.close()
        self.polling = False

    def poll(self, on: bool) -> None:
        self.polling = on

    def reported(self, ticket: int) -> list[str]:
        return sorted(self.transport.readers(ticket))

    def held(self) -> dict[str, int]:
        return held()

    def connections(self) -> int:
        return len(self.transport._server._guests)

    def close_in_a_fork(self) -> str:
        """What a child says when it has closed what it has from this process."""
        there, here = os.pipe()
        if os.fork() == 0:
            self.transport.close()
            self.transport.close()
            os.write(here, b"closed")
            os._exit(0)
        os.close(here)
        with os.fdopen(there) as child:
            return child.read()

    def fork(self) -> int:
        """A child that does nothing, as a data loader's worker, and has copies of all sockets."""
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            while True:
                signal.pause()
        return child


def serve(connection: socket.socket) -> None:
    """Be one owner until the other end hangs up."""
    lines, replies = connection.makefile("r"), connection.makefile("w")
    owner = Owner(json.loads(lines.readline()))
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed owners leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{sys.argv[1]}.part")
        listener.listen()
        os.rename(f"{sys.argv[1]}.part", sys.argv[1])  # whoever sees it can connect
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
