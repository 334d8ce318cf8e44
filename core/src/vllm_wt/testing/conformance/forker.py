"""Where the kit's processes come from: ``python -m vllm_wt.testing.conformance.forker``.

It imports what owners, readers, trainers and workers all need, which takes seconds, and forks one for
each line of its input, answered by the number of the new process. No code of a backend is imported
before the fork. It ends with its input.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any

from vllm_wt.testing import unpickling

unpickling.watch()  # torch, too, takes names of pickle with it

import torch  # noqa: E402

from vllm_wt.errors import WeightTransferError  # noqa: E402
from vllm_wt.testing.conformance.endpoint import Endpoint  # noqa: E402
from vllm_wt.testing.conformance.package import Package  # noqa: E402
from vllm_wt.testing.conformance.trainer import Trainer  # noqa: E402
from vllm_wt.testing.conformance.worker import Worker  # noqa: E402

_PR_SET_PDEATHSIG = 1
_ROLES = {role.__name__.lower(): role for role in (Package, Endpoint, Trainer, Worker)}


def main() -> None:
    """Fork a process for each line: its role, the socket that it serves, and where it says things."""
    unpickling.watch_function(torch, "load")
    unpickling.seen.clear()
    gc.freeze()  # what all have in common is not looked through by each
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for pytest, which ends us
    me = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _end_with(me)
                _be(**json.loads(line))
            finally:
                os._exit(0)  # at once: a backend's leftovers must not keep a process
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _end_with(parent: int) -> None:
    """Be killed when the forker ends, however it does; a process that is stopped, too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _be(role: str, path: str, log: str, temporary: str) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    # All are on one GPU, and NCCL takes several ranks there from several hosts alone.
    os.environ["NCCL_HOSTID"] = f"vllm-wt-{os.getpid()}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    requests, replies = connection.makefile("r"), connection.makefile("w")
    made: dict[str, Any] = {}
    for line in requests:
        method, args, keywords = json.loads(line)
        replies.write(json.dumps(_answer(made, role, method, args, keywords)) + "\n")
        replies.flush()


def _answer(
    made: dict[str, Any], role: str, method: str, args: list[Any], keywords: dict[str, Any]
) -> dict[str, Any]:
    try:
        if method == "create":
            made["it"] = _ROLES[role](*args, **keywords)
            return {"result": None}
        return {"result": getattr(made["it"], method)(*args, **keywords)}
    except WeightTransferError as error:
        return {"error": error.facts()}
    except Exception:
        return {"crash": traceback.format_exc()}


if __name__ == "__main__":
    main()
