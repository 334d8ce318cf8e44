"""Calls across a local socket, for a trainer whose engine lives in another process of this host.

One JSON object a line: ``{"method": ..., "args": [...]}`` is answered by ``{"result": ...}`` or
``{"error": text}``. No pickle; only the methods that the server was given can be called.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_wt.deadline import ROUND_S
from vllm_wt.errors import PeerDead, Timeout, WeightTransferError, from_text, to_text

_MAX_LINE = 1 << 28
"""Bytes of one message: an init info of a very large model has some ten megabytes."""
_SLACK_S = 60.0
"""Seconds a call may take beyond the deadline of what it asks for, which the worker keeps itself."""

ENGINE_METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "world_size",
)
"""What a client of an engine has."""


def engine_methods(client: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an engine client, for a :class:`RelayServer`."""
    return {name: getattr(client, name) for name in ENGINE_METHODS if hasattr(client, name)}


class RelayServer:
    """Serves calls on a Unix socket, one at a time, in the order they come.

    Args:
        path: Of the socket; it must not exist yet. Only its owner may connect.
        methods: What may be called.
    """

    def __init__(self, path: Path, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._methods = dict(methods)
        self._path = path
        self._calls = threading.Lock()
        self._stopped = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="vllm-wt-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE):
                with self._calls:
                    answer = self._answer(line)
                try:
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except OSError:
                    return  # the caller has gone; what it asked for is done

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            method = self._methods[request["method"]]
            return {"result": method(*request["args"])}
        except WeightTransferError as error:
            return {"error": to_text(error)}
        except Exception as error:
            return {"error": str(error) or type(error).__name__}


class RelayClient:
    """The other end of a :class:`RelayServer`; has vLLM's four methods.

    Args:
        path: Of the server's socket.
        timeout_s: Seconds that one call may take; the calls of a round have their own deadline
            within it.
    """

    def __init__(self, path: Path, *, timeout_s: float = ROUND_S + _SLACK_S) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise PeerDead(
                f"No engine answers at {path}: {error}", cure="start the engine first"
            ) from error
        self._lines = self._socket.makefile("rb")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server.

        Raises:
            Timeout: No answer in time; the connection is closed then.
            PeerDead: The server has gone.
            WeightTransferError: What the method raised, typed.
        """
        try:
            self._socket.sendall(json.dumps({"method": method, "args": args}).encode() + b"\n")
            line = self._lines.readline(_MAX_LINE)
        except TimeoutError as error:
            self.close()
            raise Timeout(
                "The engine's process did not answer",
                where=method,
                expected=f"within {self._timeout_s:g} s",
                cure="look for a stopped engine",
            ) from error
        except (OSError, ValueError) as error:
            raise PeerDead(f"The engine's process has gone: {error}", where=method) from error
        if not line.endswith(b"\n"):
            raise PeerDead("The engine's process has gone", where=method)
        answer = json.loads(line)
        if "error" in answer:
            raise from_text(str(answer["error"]), where=method)
        return answer["result"]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def world_size(self) -> int:
        return int(self.call("world_size"))

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._lines.close()
        self._socket.close()
