"""A relay server in a process of its own: ``python relay_process.py SOCKET``.

Its method ``hang`` says so on the output, and never returns.
"""

import sys
import threading
from pathlib import Path

from vllm_wt.clients.relay import RelayServer


def _hang() -> None:
    print("hanging", flush=True)
    threading.Event().wait()


server = RelayServer(Path(sys.argv[1]), {"hang": _hang})
print("serving", flush=True)
threading.Event().wait()
