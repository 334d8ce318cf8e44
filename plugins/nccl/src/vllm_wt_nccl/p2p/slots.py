"""Where buckets are packed, sent from, received in and put in their places from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_wt.errors import TransportError
from vllm_wt.packing import Copies
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.batching import BUCKET_BYTES, SLOTS
from vllm_wt_nccl.p2p.messages import Fabric
from vllm_wt_nccl.p2p.regions import lost_memory

_LEAST_BYTES = 1 << 20
"""Of a slot: a plan may have a few bytes only, and others follow it."""


def failed(error: RuntimeError, where: str) -> TransportError:
    """What torch has raised where buckets are packed or put in their places, typed."""
    return TransportError(
        f"A bucket can't be handled: {type(error).__name__}: {error}",
        backend=BACKEND,
        where=where,
        cure="see what torch says; where memory is short, leave it 200 MiB for each peer",
    )


class Slots:
    """A connection's. The fabric reads and writes these alone, never memory of a caller's.

    Args:
        fabric: What carries them: NCCL those of a GPU, gloo those of the host.
        device: That GPU.
    """

    def __init__(self, fabric: Fabric, device: torch.device) -> None:
        self.nbytes = BUCKET_BYTES[fabric]
        self._device = device if fabric is Fabric.NCCL else torch.device("cpu")
        self._slots: dict[int, torch.Tensor] = {}

    def slot(self, bucket: int, nbytes: int) -> torch.Tensor:
        """For a bucket of a plan, which has it in turn with others; of the room needed so far."""
        index = bucket % SLOTS
        slot = self._slots.get(index)
        if slot is None or slot.numel() < nbytes:
            # Whoever has prepared copies of the one before keeps that.
            room = min(self.nbytes, max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()))
            slot = torch.empty(room, dtype=torch.uint8, device=self._device)
            self._slots[index] = slot
        return slot[:nbytes]


class Work:
    """Copies between slots and regions, on a stream of their own where a GPU does them.

    Args:
        device: Of the transport.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind_caller(self) -> None:
        """Let what is started from here on wait for what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def current(self) -> AbstractContextManager[Any]:
        """The stream is the current one within."""
        if self._stream is None:
            return nullcontext()
        stack: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stack

    def mark(self) -> Any:
        """What tells, by ``query()``, that all that was started so far is done; None: it is."""
        if self._stream is None:
            return None
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        return mark

    def finish(self) -> None:
        """Until all that was started is done; as long as some copies take."""
        if self._stream is not None:
            self._stream.synchronize()


class Moves:
    """Copies that are prepared once and made in each pass.

    Args:
        pairs: Destinations and sources, contiguous uint8.

    Raises:
        ManifestMismatch: A tensor has lost its memory.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._near = Copies((to, source) for to, source in pairs if to.device == source.device)
        # Between host and GPU, where a bucket goes by gloo: rare, and torch knows how.
        self._far = [(to, source) for to, source in pairs if to.device != source.device]

    def run(self) -> None:
        """Make them; on a GPU they are started on the current stream.

        Raises:
            ManifestMismatch: Memory of a tensor is not where it was. Nothing is copied then.
        """
        if not self._near.in_place or _is_lost(self._far):
            raise lost_memory()
        self._near.run()
        for to, source in self._far:
            to.copy_(source)


def _is_lost(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return any(not each.untyped_storage().nbytes() for pair in pairs for each in pair)
