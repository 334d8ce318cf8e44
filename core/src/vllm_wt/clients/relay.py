"""Calls across a local socket, for a trainer whose engine lives in another process of this host.

One JSON object a line: ``{"method": ..., "args": [...]}`` is answered by ``{"result": ...}`` or
``{"error": text}``. No pickle; only the methods that the server was given can be called.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_wt.clients import METHODS
from vllm_wt.clients.limits import (
    call_limit_s,
    parsed,
    require_seconds,
    text_or_none,
    worker_count,
)
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.errors import (
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Timeout,
    UnsupportedVllm,
    WeightTransferError,
    from_text,
    to_text,
)
from vllm_wt.pausing import PauseMode
from vllm_wt.reports import report_list

_MAX_LINE = 1 << 28
"""Bytes of one message: an init info of a very large model has some ten megabytes."""
_SLACK_S = 60.0
"""Seconds a call may take beyond the deadline of what it asks for, which the worker keeps itself."""
_CLOSE_S = 5.0
"""Seconds that closing a server waits for the call in progress."""
_ANSWER_S = 1.0
"""Seconds that it then waits for clients to take their answers."""
_ACCEPT_S = 0.1
"""Seconds between two tries to accept a connection, while the host lets none in."""
_PATH_BYTES = 107
"""Bytes that Linux has for a socket's path, without the closing zero."""
_CHUNK = 1 << 16

ENGINE_METHODS = (
    *METHODS,
    "world_size",
    "weight_version",
    "configured_backend",
    "pause",
    "resume",
    "is_paused",
    "reset_caches",
    "reports",
)
"""What a client of an engine has; all but the first four are optional."""
_DEFAULT_S = {"init_weight_transfer_engine": INIT_S, "update_weights": ROUND_S}
"""Seconds of the calls whose info has a deadline, if it is missing there."""


def engine_methods(client: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an engine client, for a :class:`RelayServer`.

    Raises:
        InvalidInfo: It is no client: a method is missing, or it is a bare ``vllm.LLM``.
    """
    kind = type(client).__name__
    if hasattr(client, "llm_engine"):
        raise InvalidInfo(
            f"{kind} is an engine, whose methods have other arguments than a client's",
            where="client",
            expected="a client of the engine",
            got=kind,
            cure="pass vllm_wt.clients.local.LocalClient(llm)",
        )
    missing = [name for name in METHODS if not callable(getattr(client, name, None))]
    if missing:
        raise InvalidInfo(
            f"{kind} is no client of an engine",
            where="client",
            expected=f"the methods {', '.join(METHODS)}",
            got=f"none called {', '.join(missing)}",
            cure="pass vllm_wt.clients.local.LocalClient(llm) for a vllm.LLM",
        )
    return {name: getattr(client, name) for name in ENGINE_METHODS if hasattr(client, name)}


def _checked_path(path: str | os.PathLike[str]) -> Path:
    try:
        encoded = os.fsencode(Path(path))
    except (TypeError, UnicodeError):
        encoded = b""
    length = len(encoded)
    if not encoded or b"\0" in encoded:
        raise InvalidInfo(
            "This cannot be the path of a socket",
            where="path",
            expected="a str or a Path",
            got=repr(path)[:200],
            cure="give the path that the server was given",
        )
    if length > _PATH_BYTES:
        raise InvalidInfo(
            f"The path of the socket is too long: {path}",
            where="path",
            expected=f"at most {_PATH_BYTES} bytes",
            got=f"{length} bytes",
            cure="put the socket into a folder with a shorter name, for example one in /tmp",
        )
    return Path(path)


def _make_way(path: Path) -> None:
    """Remove the socket that a dead server left at the path."""
    if not path.parent.is_dir():
        raise InvalidInfo(
            f"There is no folder for the socket {path}",
            where="path",
            expected="a folder that exists",
            got=path.parent,
            cure="make the folder first",
        )
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    what = "is there already, and is no socket"
    if is_socket:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # the queue of a live server may be full
            code = probe.connect_ex(str(path))
        if code == errno.ECONNREFUSED:  # nobody listens
            path.unlink(missing_ok=True)
            return
        what = "is there already, and a server listens at it"
    raise InvalidInfo(
        f"{path} {what}",
        where="path",
        expected="a path where there is nothing, or the socket of a dead server",
        got="a socket in use" if is_socket else "another file",
        cure="choose another path, or stop that server" if is_socket else "choose another path",
    )


class RelayServer:
    """Serves calls on a Unix socket, one at a time, in the order they come.

    Args:
        path: Of the socket, at most 107 bytes. A socket that a dead server left there is replaced.
            Only its owner may connect.
        methods: What may be called.

    Raises:
        InvalidInfo: There can be no socket at that path.
    """

    def __init__(
        self, path: str | os.PathLike[str], methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._methods = dict(methods)
        self._path = _checked_path(path)
        self._calls = threading.Lock()
        self._lock = threading.Lock()  # of the two below
        self._stopped = threading.Event()
        self._serving: dict[threading.Thread, socket.socket] = {}
        _make_way(self._path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise InvalidInfo(
                f"There can be no socket at {path}: {error}",
                where="path",
                cure="choose a folder that this process may write to",
            ) from error
        self._thread = threading.Thread(target=self._accept, name="vllm-wt-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving: the call in progress is answered, then every client hung up on.

        It takes some seconds at most, even if a call does not end or a client does not read.
        Idempotent.
        """
        with self._lock:
            first = not self._stopped.is_set()
            self._stopped.set()
            serving = dict(self._serving)
        for connection in (self._listener, *serving.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # wakes accept and readline
        self._listener.close()
        if first:  # by the second time another server may be there
            self._path.unlink(missing_ok=True)
        if threading.current_thread() in serving:
            return  # a method closes its own server
        ended = self._calls.acquire(timeout=_CLOSE_S)  # the call in progress
        if ended:
            self._calls.release()
        _join((self._thread, *serving), _ANSWER_S)
        if not ended:
            return  # it is answered when it ends
        for thread, connection in serving.items():
            if thread.is_alive():  # its client does not read
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        _join(serving, _ANSWER_S)

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # The client has gone, or this process has too many open files: neither lasts.
                self._stopped.wait(_ACCEPT_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="vllm-wt-relay-client", daemon=True
            )
            with self._lock:
                if self._stopped.is_set():
                    connection.close()
                    return
                self._serving[thread] = connection
                try:
                    thread.start()
                except RuntimeError:  # this process has too many threads
                    del self._serving[thread]
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # A caller that has gone ends this with OSError; what it asked for is done.
            with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
                # Without its end it is half a call, or the first part of one that is too long.
                while (line := lines.readline(_MAX_LINE)).endswith(b"\n"):
                    with self._calls:
                        if self._stopped.is_set():
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
        match parsed(line):
            case {"method": str(method), "args": list(args)}:
                pass
            case _:
                raise InvalidInfo(
                    "This is no call",
                    expected='{"method": name, "args": [...]}',
                    got=line[:200],
                    cure="use RelayClient of the same vllm-wt release",
                )
        if method not in self._methods:
            raise InvalidInfo(
                f"The relay has no method {method!r}",
                where="method",
                expected=f"one of {sorted(self._methods)}",
                got=method,
                cure="use one of these methods",
            )
        return self._methods[method](*args)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = Deadline(seconds)
    for thread in threads:
        thread.join(deadline.remaining())


def _lacks(error: InvalidInfo, method: str) -> bool:
    """Whether it says that the served client has no such method."""
    return (error.where, error.got) == ("method", method)


class RelayClient:
    """The other end of a :class:`RelayServer`; has vLLM's four methods.

    Args:
        path: Of the server's socket.
        timeout_s: Seconds that one whole call may take. Init and update have the ``deadline_s`` of
            their info instead, which the worker keeps itself, and 60 s more.

    Raises:
        InvalidInfo: The path is too long for a socket.
        PeerDead: No server listens there.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout_s: float = ROUND_S + _SLACK_S
    ) -> None:
        self._path = _checked_path(path)
        self._timeout_s = require_seconds("timeout_s", timeout_s)
        self._received = bytearray()
        self._one_call = threading.Lock()  # or two callers would get each other's answers
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise PeerDead(
                f"No engine answers at {path}: {error}",
                where=str(path),
                expected="the socket of a RelayServer",
                got=type(error).__name__,
                cure="start the engine first",
            ) from error

    @property
    def address(self) -> str:
        """The socket's path; names the engine in errors."""
        return str(self._path)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server; calls of several threads go one after another.

        Raises:
            InvalidInfo: The arguments are not JSON, or the server has no such method.
            Timeout: No whole answer in time; the connection is closed then.
            PeerDead: The server has gone, or the connection is closed.
            CorruptTransfer: It did not answer in the form above; the connection is closed then.
            WeightTransferError: What the method raised, typed.
        """
        try:
            request = json.dumps({"method": method, "args": args}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInfo(
                f"The arguments are not JSON: {error}",
                where=method,
                expected="JSON",
                cure="send numbers, texts, lists and mappings only",
            ) from error
        with self._one_call:
            return self._answered(method, request, Deadline(self._limit_s(method, args)))

    def _answered(self, method: str, request: bytes, deadline: Deadline) -> Any:
        try:
            self._socket.settimeout(max(deadline.remaining(), 0.001))
            self._socket.sendall(request)  # the limit is on all of it
            line = self._line(deadline)
        except TimeoutError as error:
            self.close()
            raise Timeout(
                "The engine's process did not answer",
                where=method,
                expected=f"within {deadline.seconds:g} s",
                cure="look for a stopped engine",
            ) from error
        except OSError as error:
            self.close()
            raise PeerDead(
                f"The engine's process has gone: {error}",
                where=method,
                cure="look at its log, start it again and connect again",
            ) from error
        except BaseException:
            self.close()  # or the next call would be given this one's answer
            raise
        if not line:
            self.close()
            raise PeerDead(
                "The engine's process has gone",
                where=method,
                cure="look at its log, start it again and connect again",
            )
        match parsed(line) if line.endswith(b"\n") else None:  # None: it is too long
            case {"error": str(text)}:
                raise from_text(text, where=method)
            case {"result": result}:
                return result
        self.close()
        raise CorruptTransfer(
            "The engine's process did not answer in the relay's form",
            where=method,
            expected='{"result": ...} or {"error": text}, in a line',
            got=line[:200],
            cure="check that the socket is that of a RelayServer of the same vllm-wt release",
        )

    def _limit_s(self, method: str, args: tuple[Any, ...]) -> float:
        if method not in _DEFAULT_S or not args:
            return self._timeout_s
        return call_limit_s(args[0], default_s=_DEFAULT_S[method], slack_s=_SLACK_S)

    def _line(self, deadline: Deadline) -> bytes:
        """The next line; empty if the server hung up before its end.

        One without an end if it is too long.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > _MAX_LINE:
                return bytes(self._received)
            # A limit for each recv would start anew with every byte.
            if deadline.expired:
                raise TimeoutError
            self._socket.settimeout(max(deadline.remaining(), 0.001))
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                return b""
            self._received += chunk
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)

    def world_size(self) -> int | None:
        """Workers that receive weights; None where the served client does not tell."""
        count = self._optional("world_size")
        return None if count is None else worker_count(count, where="world_size")

    def weight_version(self) -> str | None:
        """The version that the last finish gave; None where the served client keeps none."""
        return text_or_none(self._optional("weight_version"), where="weight_version")

    def configured_backend(self) -> str | None:
        """See `vllm_wt.clients.protocol.WeightSyncClient`."""
        return text_or_none(self._optional("configured_backend"), where="configured_backend")

    def pause(self, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        """Stop generating. Harmless if it is paused already.

        Args:
            mode: What becomes of requests in flight; see `vllm_wt.pausing`.
            clear_cache: Whether keys and values are thrown away, of kept requests too.

        Raises:
            UnsupportedVllm: The served client cannot.
        """
        # One that was written for the usual pause takes no arguments.
        self._switch("pause", *(() if mode == "keep" and clear_cache else (mode, clear_cache)))

    def resume(self) -> None:
        """Go on generating, after a :meth:`pause`; harmless without.

        Raises:
            UnsupportedVllm: The served client cannot.
        """
        self._switch("resume")

    def is_paused(self) -> bool | None:
        """Whether it is paused, by whomever; None where the served client does not tell."""
        paused = self._optional("is_paused")
        if paused is not None and not isinstance(paused, bool):
            raise CorruptTransfer(
                "The engine did not say whether it is paused",
                where="is_paused",
                expected="true, false or null",
                got=repr(paused)[:200],
                cure="check that the socket is that of a RelayServer of a vLLM engine",
            )
        return paused

    def reset_caches(self, at_once: bool = True) -> None:
        """Throw away what was computed before, if the served client can; always at once, since whoever
        serves it may compute before the next call."""
        del at_once
        self._optional("reset_caches")

    def reports(self) -> list[dict[str, Any]] | None:
        """What each worker says of itself; None where the served client does not tell."""
        return report_list(self._optional("reports"), where="reports")

    def _switch(self, method: str, *args: Any) -> None:
        try:
            self.call(method, *args)
        except InvalidInfo as error:
            if not _lacks(error, method):
                raise
            raise UnsupportedVllm(
                "The engine cannot be paused",
                where=method,
                expected="a served client with pause and resume",
                got="one without",
                cure="serve an AsyncLocalClient, or another client that has them",
            ) from error

    def _optional(self, method: str) -> Any:
        try:
            return self.call(method)
        except InvalidInfo as error:
            if _lacks(error, method):
                return None
            raise

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()
