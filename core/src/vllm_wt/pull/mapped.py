"""One connection of a worker to an owner whose memory it has in its own address space.

Nothing is received: what is there is verified where it is, and the model is loaded from it. The owner
leaves it as it is until the engine has committed, and says so by a signal when it no longer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import Digests
from vllm_wt.engine import LoadWeights
from vllm_wt.errors import Aborted, CorruptTransfer
from vllm_wt.info import Handle
from vllm_wt.loading.apply import Kept
from vllm_wt.loading.slices import Runs
from vllm_wt.packing import DTYPES, view_as
from vllm_wt.pull.exposure import DIGESTED, READY, SIGNAL_WORDS, WITHDRAWN, WORD, Exposure
from vllm_wt.pull.verifying import corrupt, expected_blocks
from vllm_wt.transport import MappingTransport

_LOOK_S = 0.0002
"""Seconds between two looks at the owner's signals."""
_LOOKS_TOGETHER = 400
"""Looks right after each other, about two milliseconds of them."""


class Mapped:
    """The owner's memory, mapped.

    Args:
        transport: New; this does not close it when it raises.
        exposure: The owner's buffers, all of them tensors that are there.
        runs: What this worker needs of them, by name.
        handle: Of the owner.
        device: Of the model.
        backend: Named in errors.
        deadline: For connecting.
    """

    def __init__(
        self,
        transport: MappingTransport,
        exposure: Exposure,
        runs: Mapping[str, Runs],
        handle: Handle,
        device: torch.device,
        *,
        backend: str,
        deadline: Deadline,
    ) -> None:
        self._transport = transport
        self._exposure = exposure
        self._owner = handle.owner
        self._ticket = 0
        transport.open(handle.owner, handle.generation, handle.unwrap(backend=backend), deadline)
        buffers = transport.map(handle.owner)
        _require_as_announced(buffers, exposure, device)
        # Looked at several times a round, which a tensor would take longer for than for all else.
        self._signals = buffers[exposure.signals].view(torch.int64).numpy()
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        self._weights = Kept(
            (tensor.name, view_as(buffers[exposure.buffer[tensor.name]], tensor))
            if tensor.nbytes
            else (tensor.name, empty.view(DTYPES[tensor.dtype]).view(tensor.shape))
            for tensor in exposure.manifest.tensors
        )
        self._stream: Any = None
        if device.type == "cuda":  # apart from the default one, which waits for what the model does
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._digests: Digests | None = None
        if exposure.digested:
            self._names = [name for name in exposure.buffer if runs.get(name)]
            needed = [
                buffers[exposure.buffer[name]][start : start + nbytes]
                for name in self._names
                for start, nbytes in runs[name]
            ]
            self._digests = Digests(needed)
            self._runs = runs
            self._blocks = expected_blocks(exposure, self._names, runs).to(device)
            self._theirs = buffers[exposure.digests].view(torch.int64)
            self._made = torch.zeros(self._digests.count, dtype=torch.int64, device=device)

    def run(self, ticket: int, load_weights: LoadWeights, deadline: Deadline) -> None:
        """Verify everything of an attempt, hand it over and report it.

        Raises:
            CorruptTransfer: What is there is not what the owner has published.
            Timeout, Aborted: The deadline has passed, or was cancelled; or the owner has given it up.
            WeightTransferError: Of the transport, or of ``load_weights``.
        """
        self._ticket = ticket
        with self._on_stream():
            self._transport.check(self._owner)
            if self._digests is not None:
                self._digests.run(self._made)  # while the owner makes its own
                self._await_digests(ticket, deadline)
                self._verify()
                self._transport.check(self._owner)
        self.require_kept()
        load_weights(self._weights)
        self._transport.notify(self._owner, ticket)

    def await_published(self, ticket: int, deadline: Deadline) -> None:
        """Until the owner's memory is what an attempt is to read, which was asked for before it was.

        Raises:
            Aborted: It will not be: the owner has other memory, or has given the attempt up.
            Timeout: The deadline has passed.
            WeightTransferError: The owner does not live.
        """
        self._ticket = ticket
        # It comes within a millisecond, and who waits for it has nothing else to do.
        looks = 0
        while int(self._signals[READY]) < ticket:
            self.require_kept()
            looks += 1
            if looks % _LOOKS_TOGETHER == 0:
                self._transport.check(self._owner)
                deadline.check(
                    "The trainer has not published what it has asked for in time",
                    where="receive_weights",
                    got="a trainer that has stopped",
                )
                deadline.wait(_LOOK_S)

    def tell_committed(self) -> None:
        """Report that what was handed over is in the model, on every rank.

        Raises:
            WeightTransferError: The owner does not live.
        """
        self._transport.notify(self._owner, self._exposure.committed(self._ticket))

    def check(self) -> None:
        """See that the owner lives.

        Raises:
            WeightTransferError: It does not, or has other memory by now.
        """
        self._transport.check(self._owner)

    def require_kept(self) -> None:
        """See that the owner has left the memory as it was, up to now."""
        withdrawn = int(self._signals[WITHDRAWN])
        if withdrawn >= self._ticket:
            raise Aborted(
                "The trainer has given this attempt up, and what is mapped may have changed",
                where="mapped memory",
                expected=f"attempt {self._ticket}",
                got=f"attempt {withdrawn} is over",
                cure="push again",
            )

    def close(self) -> bool:
        """Release everything; what was handed over must not be used any more."""
        self._transport.close()
        return True

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _await_digests(self, ticket: int, deadline: Deadline) -> None:
        while int(self._signals[DIGESTED]) < ticket:
            self.require_kept()
            self._transport.check(self._owner)
            deadline.check(
                "The trainer has not made the weights readable in time",
                where="receive_weights",
                got="a trainer that has stopped",
            )
            deadline.wait(_LOOK_S)

    def _verify(self) -> None:
        expected = self._theirs.index_select(0, self._blocks)
        if not torch.equal(self._made, expected):
            raise corrupt(self._made, expected, self._names, self._runs)


def _require_as_announced(
    buffers: Sequence[torch.Tensor], exposure: Exposure, device: torch.device
) -> None:
    """What a peer exposes need not be what it has announced."""
    sizes = [tensor.nbytes for tensor in exposure.in_place]
    sizes += [max(1, exposure.blocks) * WORD] if exposure.digested else []
    sizes.append(SIGNAL_WORDS * WORD)
    got = [buffer.numel() for buffer in buffers]
    if got != sizes:
        at = next(
            (n for n, pair in enumerate(zip(got, sizes, strict=False)) if pair[0] != pair[1]), -1
        )
        raise CorruptTransfer(
            "The owner's memory is not what it has announced",
            where=f"buffer {at}",
            expected=f"{len(sizes)} buffers, {sizes[at]} bytes",
            got=f"{len(got)} buffers, {got[at] if got else 0} bytes",
            cure="connect again; both sides must run the same vllm-wt release",
        )
    *others, signals = buffers
    elsewhere = [buffer.device for buffer in others if buffer.device.type != device.type]
    elsewhere += [] if signals.device.type == "cpu" else [signals.device]
    if elsewhere:
        raise CorruptTransfer(
            "The owner's memory is not on the device of the model",
            where="map",
            expected=str(device),
            got=str(elsewhere[0]),
            cure="connect with the weights on that device",
        )
