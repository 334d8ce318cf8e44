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

from vllm_wt.deadline import ROUND_S, Deadline
from vllm_wt.errors import (
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Timeout,
    WeightTransferError,
    from_text,
    to_text,
)

_MAX_LINE = 1 << 28
"""Bytes of one message: an init info of a very large model has some ten megabytes."""
_SLACK_S = 60.0
"""Seconds a call may take beyond the deadline of what it asks for, which the worker keeps itself."""
_CLOSE_S = 5.0
"""Seconds that closing a server waits for the call in progress."""

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


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None  # matches no form


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
        self._lock = threading.Lock()  # of the two below
        self._stopped = False
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="vllm-wt-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving: the call in progress is answered, then every client hung up on. Idempotent."""
        with self._lock:
            first, self._stopped = not self._stopped, True
            serving = dict(self._serving)
        for connection in (self._listener, *serving.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # wakes accept and readline
        self._listener.close()
        if first:  # by the second time another server may be there
            self._path.unlink(missing_ok=True)
        if threading.current_thread() in serving:
            return  # a method closes its own server
        deadline = Deadline(_CLOSE_S)
        for thread in (self._thread, *serving):
            thread.join(deadline.remaining())

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="vllm-wt-relay-client", daemon=True
            )
            with self._lock:
                if self._stopped:
                    connection.close()
                    return
                self._serving[thread] = connection
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A caller that has gone ends this with OSError; what it asked for is done.
            with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                while line := lines.readline(_MAX_LINE):
                    with self._calls:
                        if self._stopped:
                            return
                        answer = self._answer(line)
                    connection.sendall(answer + b"\n")
        finally:
            with self._lock:
                del self._serving[threading.current_thread()]

    def _answer(self, line: bytes) -> bytes:
        try:
            return json.dumps({"result": self._call(line)}).encode()
        except WeightTransferError as error:
            text = to_text(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return json.dumps({"error": text}).encode()

    def _call(self, line: bytes) -> Any:
        match _parsed(line):
            case {"method": str(method), "args": list(args)}:
                pass
            case _:
                raise InvalidInfo(
                    "This is no call", expected='{"method": name, "args": [...]}', got=line[:200]
                )
        if method not in self._methods:
            raise InvalidInfo(
                f"The relay has no method {method!r}",
                where="method",
                expected=f"one of {sorted(self._methods)}",
                got=method,
            )
        return self._methods[method](*args)


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
            self._socket.close()
            raise PeerDead(
                f"No engine answers at {path}: {error}", cure="start the engine first"
            ) from error
        self._lines = self._socket.makefile("rb")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server.

        Raises:
            Timeout: No answer in time; the connection is closed then.
            PeerDead: The server has gone.
            CorruptTransfer: It did not answer in the form above; the connection is closed then.
            WeightTransferError: What the method raised, typed.
        """
        request = json.dumps({"method": method, "args": args}).encode() + b"\n"
        try:
            self._socket.sendall(request)
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
        except BaseException:
            self.close()  # or the next call would be given this one's answer
            raise
        if not line.endswith(b"\n"):
            raise PeerDead("The engine's process has gone", where=method)
        match _parsed(line):
            case {"error": str(text)}:
                raise from_text(text, where=method)
            case {"result": result}:
                return result
        self.close()
        raise CorruptTransfer(
            "The engine's process did not answer in the relay's form",
            where=method,
            expected='{"result": ...} or {"error": text}',
            got=line[:200],
        )

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
