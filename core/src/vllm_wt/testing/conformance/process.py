"""A process of the kit's, seen from the checks: every call is bounded, every failure says where."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import Self

from vllm_wt.deadline import Deadline
from vllm_wt.errors import from_facts

MOMENTS_S = 8.0
"""What "within moments" is, with room for a busy machine."""
_FORK_S = 60.0
_AT_ONCE_S = 0.001
_TAIL = 3000


class BrokenContract(AssertionError):
    """The backend did what no backend may, whatever the check is about."""


class Hang(BrokenContract):
    """A call did not return in time; its process was killed."""


class Untyped(BrokenContract):
    """A call raised an error that is none of `vllm_wt.errors`."""


class Ended(BrokenContract):
    """The process ended within a call."""


class Forker:
    """Starts processes; see `vllm_wt.testing.conformance.forker`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-wt-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_wt.testing.conformance.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, role: str) -> tuple[int, socket.socket, Path]:
        """A new process: its number, the connection to it, and the file that holds what it says."""
        folder = Path(self._folder.name)
        name = uuid.uuid4().hex[:12]
        path, log = f"\0vllm-wt-{name}", folder / f"{name}.log"  # no path is too long then
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_FORK_S)
            listener.bind(path)
            listener.listen(1)
            own = folder / f"{name}.tmp"  # what is left there is seen, and goes with the forker
            own.mkdir()
            order = {"role": role, "path": path, "log": str(log), "temporary": str(own)}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            pid = self._process.stdout.readline()
            if not pid:
                raise RuntimeError("the kit's forker has ended; its words are above")
            connection, _ = listener.accept()
        return int(pid), connection, log

    def close(self) -> None:
        """End it. Processes that it has forked go on."""
        self._process.communicate(timeout=_FORK_S)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Call:
    """A call that was sent."""

    def __init__(self, process: Process, method: str, within: float) -> None:
        self._process = process
        self._method = method
        self._within = within

    def result(self) -> Any:
        """Its answer.

        Raises:
            WeightTransferError: The typed error that it raised.
            BrokenContract: It took longer than allowed, raised something else, or ended its process.
        """
        return self._process.answer_to(self._method, self._within)


class Process:
    """One process, made in the background. Its methods are those of its role; ``within`` bounds each.

    Args:
        forker: Where it comes from.
        role: ``package``, ``endpoint``, ``trainer`` or ``worker``.
        title: What it is called in messages.
        deadline: For all its calls together.
        arguments: Of the role.
    """

    def __init__(
        self, forker: Forker, role: str, title: str, deadline: Deadline, **arguments: Any
    ) -> None:
        self.title = title
        self._deadline = deadline
        self.pid, self._connection, self._log = forker.fork(role)
        self._replies = self._connection.makefile("r")
        self._creating: Call | None = self.begin("create", _FORK_S, **arguments)

    def ready(self) -> None:
        """Wait until its role is made; the first call does that too.

        Raises:
            WeightTransferError, BrokenContract: As for any call.
        """
        creating, self._creating = self._creating, None
        if creating is not None:
            creating.result()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, within: float = MOMENTS_S, **keywords: Any) -> Any:
            return self.call(method, within, *args, **keywords)

        return call

    def call(self, method: str, within: float, *args: Any, **keywords: Any) -> Any:
        """Call a method and wait for its answer; see :meth:`Call.result`."""
        return self.begin(method, within, *args, **keywords).result()

    def begin(self, method: str, within: float, *args: Any, **keywords: Any) -> Call:
        """Call a method and go on; one call at a time."""
        if method != "create":
            self.ready()
        with contextlib.suppress(OSError):  # one that has ended is told by the answer
            self._connection.sendall((json.dumps([method, args, keywords]) + "\n").encode())
        return Call(self, method, within)

    def answer_to(self, method: str, within: float) -> Any:
        """The answer to the call that was sent last."""
        within = min(within, self._deadline.remaining())
        self._connection.settimeout(within or _AT_ONCE_S)
        try:
            line = self._replies.readline()
        except TimeoutError:
            where = self._where_it_is()
            self.kill()
            raise Hang(
                f"{self.title}: `{method}` has not returned within {within:g} s; it is here:\n{where}"
            ) from None
        except OSError:
            line = ""
        if not line:
            raise Ended(f"{self.title} has ended within `{method}`; it said:\n{self._words()}")
        reply = json.loads(line)
        if "crash" in reply:
            raise Untyped(
                f"{self.title}: `{method}` raised what is no error of vllm_wt.errors:\n{reply['crash']}"
            )
        if "error" in reply:
            error = from_facts(reply["error"])
            if not error.cure:
                raise Untyped(f"{self.title}: `{method}` raised an error without a cure: {error}")
            raise error
        return reply["result"]

    def stop(self) -> None:
        """Stop it, as a debugger or a frozen host would, and wait until it is."""
        os.kill(self.pid, signal.SIGSTOP)
        status = Path(f"/proc/{self.pid}/stat")
        while not status.read_text().rpartition(") ")[2].startswith("T"):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and wait until it has gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._connection.settimeout(MOMENTS_S)
        with contextlib.suppress(OSError):
            while self._connection.recv(1 << 16):
                pass

    def end(self) -> None:
        """Kill it if it lives, and forget it."""
        self.kill()
        self._replies.close()
        self._connection.close()

    def _where_it_is(self) -> str:
        before = len(self._words())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGUSR1)
        with contextlib.suppress(OSError):  # it may answer after all: that is as long as we wait
            self._connection.settimeout(1.0)
            self._connection.recv(1, socket.MSG_PEEK)
        return self._words()[min(before, _TAIL - 1) :] or "(it does not say)"

    def _words(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-_TAIL:].strip()
        return ""
