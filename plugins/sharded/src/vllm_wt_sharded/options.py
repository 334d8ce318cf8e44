"""Options of the trainer's side."""

from __future__ import annotations

from typing import Any

from vllm_wt import registry
from vllm_wt.backends import transport_chosen
from vllm_wt.errors import InvalidInfo, shown
from vllm_wt.spec import Kind
from vllm_wt.transport import Transport
from vllm_wt_sharded.layout import BACKEND

_PREFERRED = ("rdma", "ipc")
"""Backends over which to move bytes, where none is asked for."""


def carrier(over: Any, transport: Any) -> tuple[str, str, type[Transport]]:
    """The backend that moves the bytes, and the name and class of its Transport.

    Args:
        over: Its name; None for the first of those that are installed.
        transport: Which of its Transports; None for its default.

    Raises:
        InvalidInfo: It is not installed, or no backend of kind transport.
        BackendUnavailable, PluginError: It cannot be used here.
    """
    known = registry.default().backends
    carriers = sorted(n for n, each in known.items() if each.spec.kind is Kind.TRANSPORT)
    name = over
    if over is None:
        name = next((name for name in (*_PREFERRED, *carriers) if name in carriers), None)
    if not isinstance(name, str) or name not in carriers:
        raise InvalidInfo(
            "There is no such backend to move bytes over",
            backend=BACKEND,
            where="over",
            expected=" or ".join(map(repr, carriers)) or "a backend of kind transport",
            got=shown(over),
            cure='pip install vllm-wt-rdma, and over="rdma"; `vllm-wt list` shows all',
        )
    return name, *transport_chosen(known[name].spec, transport)
