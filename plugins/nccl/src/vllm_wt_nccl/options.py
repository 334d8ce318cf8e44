"""Options of the backend's own, checked."""

from __future__ import annotations

from typing import Any, get_args

from vllm_wt.errors import InvalidInfo, shown
from vllm_wt_nccl.cutting import Senders


def require_address(value: Any) -> str | None:
    """A name or an address of this host, or None.

    Raises:
        InvalidInfo: It is none.
    """
    if value is not None and not (isinstance(value, str) and 0 < len(value) < 256):
        raise _wrong("address", value, "a name or an address of this host")
    return value


def require_port(value: Any) -> int:
    """A port, or 0.

    Raises:
        InvalidInfo: It is none.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and 0 <= value < 1 << 16):
        raise _wrong("port", value, "a port, or 0 for any that is free")
    return int(value)


def require_senders(value: Any) -> Senders | None:
    """Which ranks send, or None for those that can.

    Raises:
        InvalidInfo: It is neither.
    """
    if value is None or (isinstance(value, str) and value in get_args(Senders)):
        return value  # type: ignore[return-value]
    raise _wrong("senders", value, " or ".join(map(repr, get_args(Senders))))


def _wrong(name: str, value: Any, expected: str) -> InvalidInfo:
    return InvalidInfo(
        f"The option {name} has no such value",
        where=name,
        expected=expected,
        got=shown(value),
        cure="leave it out for the default",
    )
