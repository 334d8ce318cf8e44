"""What the processes of ``vllm-wt bench fleet`` have in common."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_wt.clients.relay import RelayServer

_POLL_S = 0.001


def serve(
    path: str, served: object, methods: Sequence[str], drive: Callable[[], object] | None = None
) -> None:
    """Answer calls until the parent ends.

    Args:
        path: Of the socket.
        served: Whose methods are called.
        methods: Which.
        drive: Called all the time meanwhile.
    """
    never = threading.Event()
    parent = os.getppid()
    RelayServer(Path(path), {name: getattr(served, name) for name in methods})
    while os.getppid() == parent:
        if drive is not None:
            drive()
        never.wait(_POLL_S if drive is not None else 1.0)
