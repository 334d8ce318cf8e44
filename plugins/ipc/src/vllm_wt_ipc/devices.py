"""GPUs by their UUIDs, which are the same in all processes; indices are not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from vllm_wt.errors import TransportError
from vllm_wt_ipc import BACKEND

_FORM = re.compile(r"(?:mig-)?(?:gpu-)?([0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12})(/\d+/\d+)?")


def normalised(identity: str | bytes) -> str:
    """A UUID as 32 digits, of whatever spelling: ``GPU-...``, ``MIG-...``, ``MIG-GPU-.../g/c``.

    Raises:
        TransportError: It is none.
    """
    text = identity.hex() if isinstance(identity, bytes) else identity.strip().lower()
    match = _FORM.fullmatch(text)
    if match is None:
        raise TransportError(
            "A GPU's UUID can't be read",
            backend=BACKEND,
            expected="32 hexadecimal digits",
            got=repr(identity),
            cure="report it, with the output of nvidia-smi -L",
        )
    return match[1].replace("-", "") + (match[2] or "")


def require_same_gpu(owner: str, gpu: str, index: int, visible: Mapping[int, str]) -> None:
    """Refuse memory of a GPU other than the transport's.

    Args:
        owner: Named in errors.
        gpu: UUID of the owner's, normalised.
        index: The transport's device.
        visible: UUIDs of the devices that this process sees.

    Raises:
        TransportError: It is another one, or can't be seen here.
    """
    if visible.get(index) == gpu:
        return
    listed = ", ".join(f"{number}: {_shown(there)}" for number, there in sorted(visible.items()))
    others = [number for number, there in visible.items() if there == gpu]
    raise TransportError(
        f"Owner {owner!r} has its memory on another GPU"
        if others
        else f"The GPU of owner {owner!r} is not visible here",
        backend=BACKEND,
        where="open",
        expected=f"GPU {_shown(gpu)} as device {index}",
        got=f"visible: {listed or 'none'}",
        cure=f"give this worker device {others[0]}"
        if others
        else "let CUDA_VISIBLE_DEVICES of the worker name that GPU, or use the rdma backend",
    )


def _shown(gpu: str) -> str:
    return str(uuid.UUID(gpu)) if len(gpu) == 32 else gpu
