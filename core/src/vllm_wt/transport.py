"""The Transport protocol: what a one-sided fabric must do, and nothing more.

Both sides hold a Transport. The **owner** (trainer) registers the tensors that hold its weights and
exposes them; a **reader** (vLLM worker) registers its arena, opens the owner's handle, prepares a
plan of copies once and submits it every round. docs/contract.md is the whole of it, clause by clause.
Lifecycle, who calls what:

======================  =========  ==============================================================
call                    side       when
======================  =========  ==============================================================
register, unregister    both       memory appears, disappears
expose, revoke          owner      once a generation of that memory; a new generation replaces it
progress, readers       owner      about every millisecond while a peer may connect or read
open, prepare           reader     once; a new generation is read through a new transport
submit, poll, cancel    reader     every round, from one thread at a time
notify                  reader     once a round, when every byte is there
close                   both       at the end; idempotent
======================  =========  ==============================================================

No method blocks for longer than one chunk of a copy, or than the deadline it is given. Core calls an
instance from one thread at a time unless ``properties.thread_safe``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from vllm_wt.deadline import Deadline


@dataclass(frozen=True)
class TransportProperties:
    """What a Transport can do.

    Args:
        memory: torch device types whose memory can be registered.
        alignment: Bytes that source and destination offsets of a copy must be a multiple of.
        max_descriptors: Most copies in one plan; with more, core makes several.
        owner_must_poll: Whether readers make no headway unless the owner calls ``progress``.
        thread_safe: Whether methods may be called from several threads at once.
        can_cancel: Whether ``cancel`` can stop a copy that is under way.
        gaps: By memory kind, bytes that are better read too much than left out by one more copy.
        maps: Whether readers can have an owner's memory in their own address space; it is a
            `MappingTransport` then.
    """

    memory: frozenset[str] = frozenset({"cpu"})
    alignment: int = 1
    max_descriptors: int = 1 << 20
    owner_must_poll: bool = True
    thread_safe: bool = False
    can_cancel: bool = True
    gaps: Mapping[str, int] = field(default_factory=lambda: {"cpu": 1 << 14, "cuda": 1 << 20})
    maps: bool = False


@dataclass(frozen=True)
class Copy:
    """One contiguous run of bytes to read.

    Args:
        owner: Name that ``open`` was given.
        source: Index of the buffer in the owner's region.
        source_offset: First byte in that buffer.
        target: Index of the buffer in the reader's region.
        target_offset: First byte in that buffer.
        nbytes: Length, at least 1.
    """

    owner: str
    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True)
class Progress:
    """How far an operation is; ``done`` only when every byte has landed."""

    done: bool
    nbytes: int


@runtime_checkable
class Transport(Protocol):
    """A one-sided fabric. Regions, plans and operations are the Transport's own objects.

    Errors of all methods: :class:`~vllm_wt.errors.PeerDead`, :class:`~vllm_wt.errors.Revoked`,
    :class:`~vllm_wt.errors.OutOfBounds`, :class:`~vllm_wt.errors.Timeout`,
    :class:`~vllm_wt.errors.CorruptTransfer` for data that makes no sense, and
    :class:`~vllm_wt.errors.TransportError` for the rest.
    """

    properties: TransportProperties

    def __init__(self, name: str, device: torch.device) -> None:
        """Create the endpoint.

        Args:
            name: Name of this endpoint, unique among all that may meet.
            device: Where its buffers will live; a CUDA context exists on it already.
        """

    def register(self, buffers: Sequence[torch.Tensor]) -> Any:
        """Make contiguous, non-empty buffers known to the fabric; returns a region."""

    def unregister(self, region: Any) -> None:
        """Forget a region. Its memory may be freed afterwards."""

    def expose(self, region: Any, generation: int) -> bytes:
        """Handle of the region for readers: what ``open`` needs, as opaque bytes."""

    def revoke(self, generation: int) -> None:
        """Readers must not start a copy of this generation any more."""

    def progress(self) -> None:
        """Poll the fabric once (owner): connects peers, serves reads, collects notifications."""

    def readers(self, ticket: int) -> frozenset[str]:
        """Names of the readers that have notified ``ticket`` (owner)."""

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        """Connect to an owner, once."""

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        """Check and prepare a plan that is submitted every round, for one or many owners."""

    def submit(self, plan: Any) -> Any:
        """Begin the copies of a plan; returns an operation."""

    def poll(self, operation: Any) -> Progress:
        """Drive an operation and say how far it is."""

    def cancel(self, operation: Any) -> bool:
        """Give an operation up. True when nothing will write into its targets any more."""

    def notify(self, owner: str, ticket: int) -> None:
        """Tell the owner that this reader has all bytes of ``ticket``."""

    def close(self) -> None:
        """Release everything; idempotent, never blocks, never raises for a dead peer."""


@runtime_checkable
class MappingTransport(Transport, Protocol):
    """A Transport whose ``properties.maps`` is true: memory of one host, or of one GPU.

    Core then copies nothing before the commit: a worker verifies what the owner has where it is, and
    its model is written from there.
    """

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory that can be exposed: zeros, uint8, shape ``(nbytes,)``; it goes with the tensor."""

    @staticmethod
    def exposable(tensor: torch.Tensor) -> bool:
        """Whether a contiguous, non-empty tensor can be exposed where it is. If not, core copies it
        into memory of :meth:`allocate`, once a round.

        Raises:
            TransportError: It cannot, and its owner should see to that rather than pay for a copy.
        """

    @staticmethod
    def is_near(handle: bytes, device: torch.device) -> bool:
        """Whether a handle that `expose` gave is of memory that a reader on this device can map. Asked
        where a trainer has several ranks, each with memory of its own.

        Raises:
            CorruptTransfer, InvalidInfo: It is no handle.
        """

    def listen(self, seconds: float) -> None:
        """Wait until a reader says something, for so long at most; `progress` takes it in (owner)."""

    def map(self, owner: str) -> Sequence[torch.Tensor]:
        """The buffers of an open owner, in the order of its region: uint8, of its own memory. Valid
        until :meth:`close`, whatever becomes of the owner."""

    def check(self, owner: str) -> None:
        """See that an open owner lives and still exposes what was mapped; microseconds.

        Raises:
            PeerDead, Revoked: What is mapped must not be read any more.
        """
