"""What this process holds, and where it can be reached."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def resources() -> dict[str, int]:
    """What is in use: threads, children, open files and MiB of memory of this process, and names in
    its folder for temporary files, which no other process has."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not in use
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "names": len(os.listdir(tempfile.gettempdir())),
        "children": sum(
            len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")
        ),
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def memory_available() -> int:
    """Bytes of memory that this host has to spare."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def listening() -> list[tuple[str, int]]:
    """Addresses and TCP ports on which this process listens."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own has gone
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in mine:
                    address, _, port = fields[1].rpartition(":")
                    found.add((_host(address), int(port, 16)))
    return sorted(found)


def _host(address: str) -> str:
    """An address of the kernel's table; on this host, where it is any or of the longer kind."""
    raw = bytes.fromhex(address)[::-1]
    return socket.inet_ntoa(raw) if len(raw) == 4 and any(raw) else "127.0.0.1"
