"""Checksums by which the weights of ``vllm-wt bench round`` are compared between processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_wt.packing import as_bytes

_PIECE_NBYTES = 256 << 20
"""What a thread has of a tensor in host memory at a time."""
_THREADS = 8


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(tensors, threads.map(_sha256, tensors.values()), strict=True))


def _sha256(tensor: torch.Tensor) -> str:
    found = hashlib.sha256()
    for piece in torch.split(as_bytes(tensor.detach().contiguous()), _PIECE_NBYTES):
        found.update(piece.cpu().numpy().data)
    return found.hexdigest()
