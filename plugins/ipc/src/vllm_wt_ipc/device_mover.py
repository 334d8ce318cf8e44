"""Copies from a GPU's memory, on a stream of the transport's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm_wt.errors import BackendUnavailable, TransportError
from vllm_wt.packing.host import Run
from vllm_wt_ipc import BACKEND

if TYPE_CHECKING:
    from vllm_wt.packing.kernels import DeviceCopies

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to, and where from."""


class DeviceMover:
    """Starts all copies at once and asks whether they are done.

    Args:
        runs: Copies within the GPU's memory, by one kernel.
        pairs: Copies into host memory, which do not block where that is pinned.
        nbytes: Of all of them.
        stream: Of the device of the memory.
    """

    def __init__(
        self, runs: Sequence[Run], pairs: Sequence[Pair], nbytes: int, stream: torch.cuda.Stream
    ) -> None:
        self._pairs = pairs
        self._nbytes = nbytes
        self._stream = stream
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copies: DeviceCopies | None = None
        with self._here():
            # What the caller has begun with the targets is over before the first pass.
            torch.cuda.current_stream().synchronize()
            if runs:
                self._copies = _device_copies(runs, stream.device)

    def begin(self) -> None:
        with self._here(), torch.cuda.stream(self._stream):
            try:
                if self._copies is not None:
                    self._copies.run()
                for to, source in self._pairs:
                    to.copy_(source, non_blocking=True)
            finally:
                self._done.record()

    def advance(self) -> int:
        with self._here():
            return self._nbytes if self._done.query() else 0

    def settle(self) -> None:
        with self._here():
            self._done.synchronize()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """On the stream's device; what CUDA says, as our error."""
        try:
            with torch.cuda.device(self._stream.device):
                yield
        except RuntimeError as error:
            raise TransportError(
                "CUDA failed while GPU memory was copied",
                backend=BACKEND,
                where="read",
                got=error,
                cure="see what CUDA says; a process must end after most of its errors",
            ) from None


def _device_copies(runs: Sequence[Run], device: torch.device) -> DeviceCopies:
    try:
        from vllm_wt.packing.kernels import DeviceCopies
    except ImportError as error:
        raise BackendUnavailable(
            "Triton cannot be imported",
            backend=BACKEND,
            where="prepare",
            got=error,
            cure="pip install triton, which comes with torch for CUDA",
        ) from None
    return DeviceCopies(runs, device)
