"""A process for each line of this one's input, forked from what has been imported by then."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def fork_for_each_line(main: Callable[..., Any]) -> None:
    """Run ``main`` in a new process for each line: the list of its arguments, in JSON.

    Each is answered by the number of the process, whose input and output are nothing.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)  # UCX logs there
            main(*json.loads(line))
            return
        print(pid, flush=True)
