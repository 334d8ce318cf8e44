"""Owners in processes of their own; readers are the test's process, or have others."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import from_facts
from vllm_wt_nccl.p2p.transport import P2pTransport

_SCRIPT = Path(__file__).with_name("owner_process.py")
_LONG_S = 30.0


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class EndpointProcess:
    """The test's end of an owner, or of a reader that may die."""

    def __init__(
        self, socket_path: Path, name: str, device: str, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_LONG_S)
        self._socket.connect(str(socket_path))
        self._out, self._in = self._socket.makefile("w"), self._socket.makefile("r")
        self._pid: int = self._exchange([name, device, environment])

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have a command carried out; returns its result, or raises its typed error."""
        return self._exchange([command, arguments])

    def begin(self, command: str, **arguments: Any) -> None:
        """Have a command carried out, and don't wait for its :meth:`result`."""
        self._say([command, arguments])

    def result(self) -> Any:
        reply = self._in.readline()
        assert reply, f"process {self.name} has ended"
        answer = json.loads(reply)
        if "error" in answer:
            raise from_facts(answer["error"])
        return answer["result"]

    def expose(self, *sizes: int, generation: int = 1, seed: int = 0) -> bytes:
        handle: str = self.ask("expose", generation=generation, sizes=sizes, seed=seed)
        return handle.encode()

    def stop(self) -> None:
        """Returns once it has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        state = Path(f"/proc/{self._pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """Returns once it has ended, unless a child of its holds on to the line."""
        os.kill(self._pid, signal.SIGKILL)
        state = Path(f"/proc/{self._pid}/stat")
        while state.exists():
            time.sleep(0.001)
        self._pid = 0

    def close(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        for file in (self._in, self._out, self._socket):
            with suppress(OSError):
                file.close()

    def _exchange(self, message: Any) -> Any:
        self._say(message)
        return self.result()

    def _say(self, message: Any) -> None:
        print(json.dumps(message), file=self._out, flush=True)


class Bench:
    """What a test works with."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._processes: list[EndpointProcess] = []
        self._readers: list[P2pTransport] = []
        self.content: Callable[[int, int], torch.Tensor] = _load(_SCRIPT).content

    def process(
        self, name: str = "owner", device: str = "cpu", **environment: str
    ) -> EndpointProcess:
        process = EndpointProcess(self._socket_path, name, device, environment)
        self._processes.append(process)
        return process

    def reader(self, name: str | None = None, device: str = "cpu") -> P2pTransport:
        reader = P2pTransport(name or f"reader{len(self._readers)}", torch.device(device))
        self._readers.append(reader)
        return reader

    @staticmethod
    def deadline(seconds: float = _LONG_S) -> Deadline:
        return Deadline(seconds)

    @staticmethod
    def arena(reader: P2pTransport, nbytes: int, device: str = "cpu") -> tuple[torch.Tensor, Any]:
        """A zeroed, registered target and its region."""
        target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return target, reader.register([target])

    def pass_over(self, reader: P2pTransport, plan: Any) -> Any:
        """Submit a plan and poll it until it is done; returns the operation."""
        operation = reader.submit(plan)
        self.until(lambda: reader.poll(operation).done)
        return operation

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = self.deadline()
        while not condition():
            assert not deadline.expired, "waited in vain"
            time.sleep(0.0002)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        for process in self._processes:
            process.close()


@pytest.fixture(scope="session")
def p2p_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where owners can be had."""
    path = tmp_path_factory.mktemp("owners") / "socket"
    server = subprocess.Popen(
        [sys.executable, str(_SCRIPT), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    deadline = Deadline(_LONG_S)
    while not path.exists():
        assert server.poll() is None, "the owners' server has ended"
        assert not deadline.expired
        time.sleep(0.01)
    yield path
    server.communicate()


@pytest.fixture
def bench(p2p_processes: Path) -> Iterator[Bench]:
    bench = Bench(p2p_processes)
    yield bench
    bench.close()
