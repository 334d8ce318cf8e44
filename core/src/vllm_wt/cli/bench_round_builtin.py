"""vLLM's built-in ``ipc``, as the other side of ``vllm-wt bench round``."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_wt.errors import UnsupportedVllm

NAME = "ipc"
_SWITCH = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_BUFFER_NBYTES = 2 << 30
"""Of the packed mode: more than the largest tensor, which has to fit."""


class BuiltinIpc:
    """Rounds of vLLM's own, as its trainers do them through 0.27.

    Args:
        llm: An engine with vLLM's ``ipc``, started where pickled handles are allowed.
        state: The weights, on CUDA.
        packed: Whether they are sent through a buffer.

    Raises:
        UnsupportedVllm: This release has no ``trainer_send_weights``.
    """

    def __init__(self, llm: Any, state: dict[str, torch.Tensor], *, packed: bool) -> None:
        self._send = trainer_send_weights()
        self._llm = llm
        self._state = state
        self._arguments = {
            "send_mode": self._update,
            "packed": packed,
            "packed_buffer_size_bytes": _BUFFER_NBYTES,
        }
        llm.init_weight_transfer_engine({"init_info": {}})

    def round(self, number: int) -> None:
        """Every call on the worker has ended when this returns; its number is nothing to vLLM."""
        self._llm.start_weight_update()
        self._send(iter(self._state.items()), self._arguments)
        self._llm.finish_weight_update()

    def _update(self, info: Any) -> None:
        """Handles are pickled at once, as vLLM's HTTP transport does: quicker than one by one."""
        fields = dict(vars(info))
        handles = pickle.dumps(fields.pop("ipc_handles"))
        fields["ipc_handles_pickled"] = base64.b64encode(handles).decode()
        self._llm.update_weights({"update_info": fields})


def trainer_send_weights() -> Any:
    """vLLM's own trainer's side.

    Raises:
        UnsupportedVllm: It is another one in this release.
    """
    from vllm import __version__ as release
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    send = getattr(IPCWeightTransferEngine, "trainer_send_weights", None)
    if send is None:
        raise UnsupportedVllm(
            "vLLM's own ipc is not driven by the benchmark in this release",
            where=f"vLLM {release}",
            expected="IPCWeightTransferEngine.trainer_send_weights",
            got="none",
            cure="use vLLM 0.26 or 0.27; or measure without it: --against none",
        )
    return send


@contextmanager
def pickles_allowed() -> Iterator[None]:
    """For engines that are started within: vLLM's handles come pickled, and ours must not need that."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before
