"""Memory that a check has an endpoint hold, always zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_LARGE = 1 << 30
_BESIDE = 3
"""Bytes between two views of one allocation: none begins at a round address."""


def zeros(form: str, sizes: list[int], device: torch.device, allocate: Any) -> list[torch.Tensor]:
    """Buffers of these sizes, uint8.

    Args:
        form: ``private`` (torch's own), ``shared`` (by torch, between processes), ``allocated`` (by
            the transport) or ``views`` (of one such allocation, at odd addresses).
        sizes: Of each.
        device: Where.
        allocate: Of a `MappingTransport`.
    """
    made: Callable[[list[int], torch.device, Any], list[torch.Tensor]] = _FORMS[form]
    return made(sizes, device, allocate)


def _private(sizes: list[int], device: torch.device, allocate: Any) -> list[torch.Tensor]:
    return [
        # Of so many, a host takes seconds to find the pages; here each is there once it is used.
        torch.from_numpy(np.zeros(nbytes, np.uint8))
        if nbytes > _LARGE and device.type == "cpu"
        else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for nbytes in sizes
    ]


def _shared(sizes: list[int], device: torch.device, allocate: Any) -> list[torch.Tensor]:
    made = _private(sizes, device, allocate)
    for tensor in made:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return made


def _allocated(sizes: list[int], device: torch.device, allocate: Any) -> list[torch.Tensor]:
    return [allocate(nbytes, device) for nbytes in sizes]


def _views(sizes: list[int], device: torch.device, allocate: Any) -> list[torch.Tensor]:
    whole = allocate(sum(sizes) + _BESIDE * len(sizes), device)
    parts = whole.split([part for nbytes in sizes for part in (_BESIDE, nbytes)])
    return list(parts[1::2])


_FORMS = {"private": _private, "shared": _shared, "allocated": _allocated, "views": _views}
