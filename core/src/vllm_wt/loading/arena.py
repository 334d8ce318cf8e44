"""The memory that a worker receives into: where it is, how much of it, and why.

============  ==================================================  ====================================
staging       received into                                       the model
============  ==================================================  ====================================
``device``    memory of the model's device, all of it             untouched until the commit
``host``      host memory, pinned where the model is on a GPU     untouched until the commit
``none``      a part at a time, which is loaded at once           old and new mixed until the last part
``auto``      the first of these that there is memory for
============  ==================================================  ====================================

Where a worker has the trainer's memory in its own address space, ``auto`` receives nothing: that is
``mapped``, in which the model is untouched until the commit. ``none`` then loads everything at once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vllm_wt.errors import InvalidInfo, LoadError
from vllm_wt.info import Staging

RESERVE = "VLLM_WT_ARENA"
"""Environment variable of an engine: memory to take before vLLM sizes its KV cache, say ``4GiB``."""

_MARGIN = 1 << 30
"""Bytes that are left to others where ``auto`` chooses."""
_MOST = 1 << 50
"""Bytes that nobody has."""
_SIZE = re.compile(r"(\d+)\s*(|[KMGT]i?B)", re.IGNORECASE)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


@dataclass(frozen=True)
class Choice:
    """Which staging, and why.

    Args:
        staging: ``"device"``, ``"host"``, ``"none"`` or ``"mapped"``.
        why: In words, for people.
    """

    staging: Literal["device", "host", "none", "mapped"]
    why: str


class Arena:
    """A worker's buffer, kept from round to round and from trainer to trainer.

    Args:
        device: Of the model.

    Raises:
        InvalidInfo: The reservation is no size.
        LoadError: There is not enough memory for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: torch.Tensor | None = None
        reserved = _reserved()
        if reserved:
            self._buffer = _made(reserved, device)

    @property
    def nbytes(self) -> int:
        """What is held now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def choose(self, asked: Staging, nbytes: int, *, host: bool) -> Choice:
        """Where to receive.

        Args:
            asked: What the trainer wants.
            nbytes: Needed to receive everything.
            host: Whether the transport can receive into host memory.

        Raises:
            InvalidInfo: Host memory is asked for and the transport cannot receive into it.
        """
        if asked == "host" and not host:
            raise InvalidInfo(
                "The transport cannot receive into host memory",
                where="staging",
                expected="device, none or auto",
                got="host",
                cure='use staging="auto"',
            )
        if asked != "auto":
            return Choice(asked, "asked for")
        held = self._buffer is not None and self._buffer.device.type == self._device.type
        free = _free(self._device)
        if held and self.nbytes >= nbytes:
            return Choice(
                "device", f"{_size(nbytes)} fit into the {_size(self.nbytes)} that is held"
            )
        room = free + (self.nbytes if held else 0)
        if nbytes + _MARGIN <= room:
            return Choice(
                "device", f"{_size(nbytes)} of {_size(room)} that is free on {self._device}"
            )
        short = f"{_size(nbytes)} do not fit into {_size(room)} on {self._device}"
        on_host = torch.device("cpu")
        if self._device.type != "cpu" and host and nbytes + _MARGIN <= _free(on_host):
            return Choice("host", f"{short}; {_size(_free(on_host))} of host memory is free")
        return Choice("none", f"{short}; it is loaded while it arrives")

    def take(self, nbytes: int, staging: str) -> torch.Tensor:
        """A buffer of zeros: uint8 of shape ``(nbytes,)``, the same memory again where it is enough.

        Raises:
            LoadError: There is not enough memory.
        """
        device = torch.device("cpu") if staging == "host" else self._device
        if (
            self._buffer is None
            or self._buffer.numel() < nbytes
            or self._buffer.device.type != device.type
        ):
            self._buffer = None  # free the old one before the new one is made
            self._buffer = _made(nbytes, device, pinned=self._device.type == "cuda")
        part = self._buffer[:nbytes]
        part.zero_()
        if part.is_cuda:  # a fabric writes without regard to our streams
            torch.cuda.current_stream(part.device).synchronize()
        return part

    def abandon(self) -> None:
        """Something may still write into it: never use it again."""
        self._buffer = None


def _made(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    free = _free(device)
    if nbytes > free:  # a CPU would promise it, and end the process later
        raise _no_memory(nbytes, device, _size(free))
    try:
        pin = pinned and device.type == "cpu"
        return torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        raise _no_memory(nbytes, device, str(error)) from error


def _no_memory(nbytes: int, device: torch.device, got: str) -> LoadError:
    return LoadError(
        "There is no memory to receive into",
        where=str(device),
        expected=_size(nbytes),
        got=got,
        cure="leave more memory free (gpu_memory_utilization), reserve it with VLLM_WT_ARENA, or use "
        'staging="auto"',
    )


def _reserved() -> int:
    text = os.environ.get(RESERVE, "").strip()
    match = _SIZE.fullmatch(text or "0")
    nbytes = int(match[1]) * _UNITS[match[2].upper()] if match else _MOST
    if nbytes >= _MOST:
        raise InvalidInfo(
            "The memory to reserve is no size",
            where=RESERVE,
            expected="bytes, or a number with KiB, MiB, GiB or TiB",
            got=repr(text),
            cure=f"{RESERVE}=4GiB, say",
        )
    return nbytes


def _free(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(_available(), _within_limit())


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # nobody says


def _within_limit() -> int:
    """What a control group leaves, as containers have one."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    if limit == "max":
        return 1 << 62
    return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
