"""Which host this is, and which part of it: memory and abstract sockets don't leave either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from vllm_wt.errors import TransportError
from vllm_wt_ipc import BACKEND

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


class Host(NamedTuple):
    """Where a process can be reached.

    Args:
        boot: The kernel's boot id.
        network: Inode of the network namespace.
    """

    boot: str
    network: int


def here() -> Host:
    """This process's.

    Raises:
        TransportError: There is no /proc that says so.
    """
    try:
        return Host(_BOOT.read_text().strip(), os.stat(_NETWORK).st_ino)
    except OSError as error:
        raise TransportError(
            "This host can't be told from others",
            backend=BACKEND,
            expected=f"{_BOOT} and {_NETWORK}",
            got=error,
            cure="run on Linux with /proc mounted, or use the rdma backend",
        ) from None


def require_here(owner: str, there: Host) -> None:
    """Refuse an owner whose memory can't be had here.

    Raises:
        TransportError: It is on another host, or in another network namespace.
    """
    ours = here()
    if there.boot != ours.boot:
        raise TransportError(
            f"Owner {owner!r} is on another host",
            backend=BACKEND,
            where="open",
            expected=f"boot id {ours.boot}",
            got=there.boot,
            cure="run trainer and workers on one host, or use the rdma backend",
        )
    if there.network != ours.network:
        raise TransportError(
            f"Owner {owner!r} is in another container: its network namespace is another one",
            backend=BACKEND,
            where="open",
            expected=f"network namespace {ours.network}",
            got=there.network,
            cure="let the containers share their network namespace (one pod; docker run "
            "--network=host or --network=container:NAME), or use the rdma backend",
        )
