"""How much host memory there is to be had: the kernel kills processes rather than say that it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes: of the host, or what the limits of the container leave if that is less."""
    room = [_host()]
    for folder in _groups():
        with suppress(OSError, ValueError):  # a group without a limit
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = _numbers(folder / "memory.stat")
            room.append(limit - used + stat["inactive_file"] + stat["active_file"])
    return max(0, min(room))


def _host() -> int:
    return _numbers(_PROC / "meminfo")["MemAvailable:"] << 10


def _groups() -> Iterator[Path]:
    """The groups (of cgroup v2) that this process is in, the innermost first."""
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                inner = _CGROUPS / line[3:].strip("/")
                yield inner
                while inner != _CGROUPS:
                    inner = inner.parent
                    yield inner


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
