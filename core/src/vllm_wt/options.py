"""Options of trainers' engines, checked."""

from __future__ import annotations

import inspect
from typing import Any

from vllm_wt.digests import BLOCK
from vllm_wt.errors import InvalidInfo, shown


def own_options(cls: type[Any]) -> list[str]:
    """What a class takes by keyword alone: options of `WeightSync.connect`, where it is a backend's."""
    return [
        name
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]


def require_one_of(name: str, value: Any, values: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in values:
        raise InvalidInfo(
            f"The option {name} has no such value",
            where=name,
            expected=" or ".join(map(repr, values)),
            got=shown(value),
            cure="leave it out for the default",
        )


def require_bucket(value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and 0 < value < 1 << 40 and value % BLOCK == 0):
        raise InvalidInfo(
            "This cannot be the size of a bucket",
            where="bucket_nbytes",
            expected=f"a multiple of {BLOCK}, more than 0",
            got=shown(value),
            cure="leave it out for the default",
        )
