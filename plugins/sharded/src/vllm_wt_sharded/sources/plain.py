"""Local tensors that are described by something else than themselves."""

from __future__ import annotations

from typing import Any

from vllm_wt.errors import InvalidInfo
from vllm_wt.sources.whole import is_dtensor, require_sendable
from vllm_wt_sharded.layout import BACKEND


def require_plain(name: Any, value: Any, *, where: str) -> None:
    """Refuse what is no plain tensor with values.

    Raises:
        InvalidInfo: As of core's ``require_sendable``; or it is a DTensor, whose shape is the full one.
    """
    require_sendable(name, value, where=where)
    if is_dtensor(value):
        raise InvalidInfo(
            f"Tensor {name!r} says itself what this rank holds of it",
            backend=BACKEND,
            where=where,
            expected="a plain local tensor",
            got=type(value).__name__,
            cure="give DTensors to TensorShards, or their to_local() here",
        )
