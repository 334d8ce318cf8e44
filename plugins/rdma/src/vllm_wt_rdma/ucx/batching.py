"""From copies to messages: merged, cut where long, gathered where short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from vllm_wt.transport import Copy
from vllm_wt_rdma.ucx.messages import MAX_RANGES

CHUNK_BYTES = 16 << 20
"""Most bytes of one message. UCX may copy all of it inside one call, within a host."""
DIRECT_BYTES = 1 << 20
"""A run of so many bytes is a message of its own, received where it belongs; shorter ones are
gathered by the owner, and put in their places by the reader."""
GATHER_BYTES = 1 << 20
"""Most bytes of a message of several runs. UCX carries nothing while one is gathered, or put in its
places."""


@dataclass
class Batch:
    """The copies of one message, in the order of its bytes."""

    copies: list[Copy] = field(default_factory=list)
    nbytes: int = 0

    def add(self, copy: Copy) -> None:
        self.copies.append(copy)
        self.nbytes += copy.nbytes


def batch(copies: Iterable[Copy]) -> dict[str, list[Batch]]:
    """The messages of each owner, for copies that are checked."""
    found: dict[str, list[Batch]] = {}
    gathered: dict[str, Batch] = {}
    for copy in _merge(copies):
        batches = found.setdefault(copy.owner, [])
        if copy.nbytes >= DIRECT_BYTES:
            batches.extend(Batch([part], part.nbytes) for part in _cut(copy))
            continue
        growing = gathered.get(copy.owner)
        if (
            growing is None
            or growing.nbytes + copy.nbytes > GATHER_BYTES
            or len(growing.copies) >= MAX_RANGES
        ):
            growing = gathered[copy.owner] = Batch()
            batches.append(growing)
        growing.add(copy)
    return found


def _merge(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Join neighbours that are contiguous on both sides."""
    last: Copy | None = None
    for copy in copies:
        if last is None:
            last = copy
        elif (
            (last.owner, last.source, last.target) == (copy.owner, copy.source, copy.target)
            and last.source_offset + last.nbytes == copy.source_offset
            and last.target_offset + last.nbytes == copy.target_offset
        ):
            last = replace(last, nbytes=last.nbytes + copy.nbytes)
        else:
            yield last
            last = copy
    if last is not None:
        yield last


def _cut(copy: Copy) -> Iterator[Copy]:
    """Cut what is longer than a chunk."""
    for done in range(0, copy.nbytes, CHUNK_BYTES):
        yield replace(
            copy,
            source_offset=copy.source_offset + done,
            target_offset=copy.target_offset + done,
            nbytes=min(CHUNK_BYTES, copy.nbytes - done),
        )
