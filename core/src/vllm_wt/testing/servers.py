"""Engines in processes of their own: vLLM's HTTP server, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

from vllm_wt.bridge.register import PREFIX
from vllm_wt.deadline import Deadline
from vllm_wt.errors import EngineError, PeerDead, from_text
from vllm_wt.testing.engines import environment, settings

_START_S = 300.0
"""Seconds that an engine may take to start; two cores need 25 to 40."""
_STOP_S = 15.0
"""Seconds that an engine may take to end by itself."""
_STOP_STARTING_S = 1.0
"""The same before it has started: whoever interrupts that does not want to wait."""
_KILLED_S = 5.0
"""Seconds until processes that were killed are gone."""
_ANSWER_S = 120.0
"""Seconds that a server may take to answer."""
_LOOK_S = 0.1
"""Seconds between two looks at an engine that starts."""
_LOG_LINES = 20


def start_server(
    model: Path,
    dtype: str,
    backend: str,
    *,
    tp: int = 1,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    extra_args: Sequence[str] = (),
    start_s: float = _START_S,
) -> Server:
    """vLLM's HTTP server on 127.0.0.1, ready for weight transfer. Close it.

    Args:
        model: The checkpoint's folder.
        dtype: Its dtype by torch's name.
        backend: Name of an installed backend.
        tp: Tensor-parallel size. On a CPU each worker gets a core.
        port: A free one without it.
        env: Added to this process's environment.
        extra_args: Further arguments of the server.
        start_s: Seconds that it may take to answer.

    Raises:
        EngineError: It ended before it answered; ``got`` has the last lines of its log.
        Timeout: It did not answer in time.
    """
    return Server(
        settings(model, dtype, PREFIX + backend, tp),
        port=port or _free_port(),
        env={**environment(tp), **os.environ, "VLLM_SERVER_DEV_MODE": "1", **(env or {})},
        extra_args=extra_args,
        start_s=start_s,
    )


def greedy_tokens_http(url: str, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    """:func:`greedy_tokens` of a server, without a tokenizer at either end.

    Raises:
        PeerDead: Nothing answers there.
        EngineError: The server refused, in its own words.
    """
    outputs = []
    for ids in prompt_ids:
        body = {
            "prompt": ids,
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,  # the text is empty without a tokenizer
        }
        (choice,) = ask_http(url, "/v1/completions", body)["choices"]
        outputs.append([int(token) for token in choice["token_ids"]])
    return outputs


def ask_http(url: str, path: str, body: Any = None) -> Any:
    """The JSON that a server answers to a POST of ``body``, or to a GET without one.

    Raises:
        PeerDead: Nothing answers there.
        EngineError: The server refused, in its own words.
    """
    request = urllib.request.Request(
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with _OPENER.open(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            raise from_text(error.read().decode(errors="replace"), where=path) from error
    except (OSError, ValueError) as error:
        raise PeerDead(
            f"No server answers at {url}: {error}",
            where=path,
            cure="start the server, and check its port",
        ) from error


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # 127.0.0.1 needs no proxy


class EngineProcess:
    """An engine in a session of its own: Ctrl-C does not reach it, and :meth:`close` ends all of it.

    Args:
        argv: Arguments of this Python: ``-m``, the module, and the module's own.
        env: Its environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._name = argv[1]
        self._stop_s = _STOP_STARTING_S
        with tempfile.NamedTemporaryFile(prefix="vllm-wt-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise EngineError with the last lines of its log once the process has ended."""
        code = self.process.poll()
        if code is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise EngineError(
                f"The engine's process ended with exit code {code}",
                where=self._name,
                got="\n" + "\n".join(lines[-_LOG_LINES:]),
                cure="the first error in these lines is the cause",
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait while the process lives; close it when it does not get there.

        Raises:
            EngineError: It ended.
            Timeout: It was not ready within ``seconds``.
        """
        deadline = Deadline(seconds)
        try:
            self.check()
            while not ready():
                self.check()
                deadline.check("The engine did not start", got=f"see {self.log}")
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LOOK_S)
        except BaseException:
            self.close()
            raise
        self._stop_s = _STOP_S

    def close(self) -> None:
        """End every process of the engine. Idempotent."""
        if self.process.poll() is None:
            # The first process alone: it ends the others, which clean up after themselves.
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self._stop_s)
        for number, seconds in ((signal.SIGTERM, self._stop_s), (signal.SIGKILL, _KILLED_S)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
                self._wait_gone(seconds)
        self.process.wait(_KILLED_S)
        self.log.unlink(missing_ok=True)

    def _wait_gone(self, seconds: float) -> None:
        """Until the group has no process, which is a ProcessLookupError, or for so long."""
        deadline = Deadline(seconds)
        while not deadline.expired:
            self.process.poll()  # a zombie is in the group until it is waited for
            os.killpg(self.process.pid, 0)
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Server(EngineProcess):
    """vLLM's HTTP server; see :func:`start_server`.

    Args:
        settings: Of the engine, by the names that ``LLM`` has for them.
        port: On 127.0.0.1.
        env: Its environment.
        extra_args: Further arguments of the server.
        start_s: Seconds that it may take to answer.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        port: int,
        env: Mapping[str, str],
        extra_args: Sequence[str],
        start_s: float,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        # Not `vllm serve`: it looks up a distribution named vllm, and the CPU build has another.
        argv = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        super().__init__([*argv, "--port", str(port), *_flags(settings), *extra_args], env)
        self.wait_until(self._healthy, start_s)

    def _healthy(self) -> bool:
        try:
            ask_http(self.url, "/health")
        except (PeerDead, EngineError):
            return False
        return True


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the server's arguments."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
