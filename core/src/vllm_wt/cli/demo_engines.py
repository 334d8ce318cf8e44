"""The demo's engines, each in processes of its own: a vLLM ``LLM`` behind a relay, and a server.

``python -m vllm_wt.cli.demo_engines CONFIG`` is the process of the first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from vllm_wt.errors import PeerDead

_START_S = 300.0
_PARENT_S = 0.5
"""Seconds between two looks at whether the demo still lives."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine of the demo is started with.

    Args:
        folder: The demo's own, for sockets.
        checkpoint: The model's folder.
        dtype: Its dtype by torch's name.
        backend: Name of an installed backend.
        tp: Tensor-parallel size.
    """

    folder: str
    checkpoint: str
    dtype: str
    backend: str
    tp: int


class DemoEngine(Protocol):
    """What the demo asks of an engine that runs."""

    title: ClassVar[str]
    pid: int
    address: dict[str, str]
    """Where a trainer finds it: see `demo_trainer`."""

    def tokens(self, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Its greedy continuations."""

    def version(self) -> str | None:
        """The version that vLLM reports; None before vLLM 0.27."""

    def check(self) -> None:
        """Raise EngineError with the end of its log when it has died."""

    def close(self) -> None:
        """End its processes. Idempotent."""


class LlmEngine:
    """A ``vllm.LLM`` in a process of its own, reached over a relay."""

    title: ClassVar[str] = "vllm.LLM"

    def __init__(self, options: EngineOptions) -> None:
        from vllm_wt.testing.servers import EngineProcess

        self._socket = Path(options.folder) / "engine.sock"
        self.address = {"socket": str(self._socket)}
        argv = ["-m", "vllm_wt.cli.demo_engines", json.dumps(vars(options))]
        self._process = EngineProcess(argv, os.environ)
        self.pid = self._process.process.pid
        self.check, self.close = self._process.check, self._process.close
        self._process.wait_until(self._connected, _START_S)

    def _connected(self) -> bool:
        from vllm_wt.clients.relay import RelayClient

        try:
            self._relay = RelayClient(self._socket)
        except PeerDead:
            return False
        return True

    def tokens(self, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        tokens: list[list[int]] = self._relay.call("tokens", prompt_ids, new_tokens)
        return tokens

    def version(self) -> str | None:
        version: str | None = self._relay.call("version")
        return version


class ServerEngine:
    """vLLM's HTTP server, as a deployment would run it."""

    title: ClassVar[str] = "vLLM's HTTP server"

    def __init__(self, options: EngineOptions) -> None:
        from vllm_wt.testing.servers import start_server

        self._server = start_server(
            Path(options.checkpoint), options.dtype, options.backend, tp=options.tp
        )
        self.address = {"url": self._server.url}
        self.pid = self._server.process.pid
        self.check, self.close = self._server.check, self._server.close

    def tokens(self, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        from vllm_wt.testing.servers import greedy_tokens_http

        return greedy_tokens_http(self._server.url, prompt_ids, new_tokens)

    def version(self) -> str | None:
        from vllm_wt.clients.http import HttpClient

        client = HttpClient(self._server.url)
        try:
            return client.weight_version()
        finally:
            client.close()


def serve_llm(options: EngineOptions) -> None:
    """Start an ``LLM`` and serve it on the demo's socket, until the demo ends this process."""
    from vllm_wt.clients.local import LocalClient
    from vllm_wt.clients.relay import RelayServer, engine_methods
    from vllm_wt.testing.engines import greedy_tokens, start_llm

    parent = os.getppid()
    llm = start_llm(Path(options.checkpoint), options.dtype, options.backend, tp=options.tp)
    # Unwinds, so that vLLM ends its workers and removes what it shares with them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    client = LocalClient(llm)
    methods = engine_methods(client) | {
        "tokens": lambda prompt_ids, count: greedy_tokens(llm, prompt_ids, count),
        "version": client.weight_version,
    }
    RelayServer(Path(options.folder) / "engine.sock", methods)
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_PARENT_S)


if __name__ == "__main__":
    serve_llm(EngineOptions(**json.loads(sys.argv[1])))
