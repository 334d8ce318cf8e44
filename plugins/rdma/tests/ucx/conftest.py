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
from vllm_wt_rdma.ucx.transport import UcxTransport

_SCRIPT = Path(__file__).with_name("owner_process.py")
_LONG_S = 30.0


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OwnerProcess:
    """The test's end of an owner, or of a reader that may die."""

    def __init__(self, socket_path: Path, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_LONG_S)
        self._socket.connect(str(socket_path))
        self._out, self._in = self._socket.makefile("w"), self._socket.makefile("r")
        settings = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        self._pid: int = self._exchange([settings, name])

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have a command carried out; returns its result."""
        return self._exchange([command, arguments])

    def begin(self, command: str, **arguments: Any) -> None:
        """Have a command carried out, and don't wait for its :meth:`result`."""
        self._say([command, arguments])

    def result(self) -> Any:
        reply = self._in.readline()
        assert reply, f"process {self.name} has ended"
        return json.loads(reply)

    def expose(self, *sizes: int, generation: int = 1, seed: int = 0) -> bytes:
        handle: str = self.ask("expose", generation=generation, sizes=sizes, seed=seed)
        return handle.encode()

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.await_end()

    def await_end(self) -> None:
        assert self._in.readline() == ""
        self._pid = 0

    def close(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
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
        self._owners: list[OwnerProcess] = []
        self._readers: list[UcxTransport] = []
        self.content: Callable[[int, int], torch.Tensor] = _load(_SCRIPT).content

    def owner(self, name: str = "owner") -> OwnerProcess:
        owner = OwnerProcess(self._socket_path, name)
        self._owners.append(owner)
        return owner

    def reader(self, name: str | None = None) -> UcxTransport:
        reader = UcxTransport(name or f"reader{len(self._readers)}", torch.device("cpu"))
        self._readers.append(reader)
        return reader

    @staticmethod
    def deadline(seconds: float = _LONG_S) -> Deadline:
        return Deadline(seconds)

    def arena(self, reader: UcxTransport, nbytes: int) -> tuple[torch.Tensor, Any]:
        """A zeroed, registered target and its region."""
        target = torch.zeros(nbytes, dtype=torch.uint8)
        return target, reader.register([target])

    def pass_over(self, reader: UcxTransport, plan: Any) -> Any:
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
        for owner in self._owners:
            owner.close()


@pytest.fixture(scope="session")
def ucxx() -> None:
    """UCXX is an optional dependency."""
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("UCXX is not installed")


@pytest.fixture(scope="session")
def ucx_owners(ucxx: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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
def bench(ucx_owners: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    bench = Bench(ucx_owners)
    yield bench
    bench.close()
