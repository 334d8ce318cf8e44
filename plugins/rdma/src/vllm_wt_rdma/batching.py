"""From copies to reads: checked, merged, cut into chunks, grouped into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from vllm_wt import bounds
from vllm_wt.transport import Copy
from vllm_wt_rdma import info
from vllm_wt_rdma.endpoint import Row
from vllm_wt_rdma.info import BufferInfo
from vllm_wt_rdma.nixl import BACKEND

CHUNK_BYTES = 64 << 20
"""Most bytes of one descriptor, and of one batch. Within a host UCX copies inside the call that
posts a batch, at 3 to 8 GB/s: this keeps a call to about 20 ms, and so the deadline's grain, while
bigger batches were no faster."""
MAX_ROWS = 1 << 14
"""Most descriptors of one batch: very small copies take about a microsecond each, whatever their
bytes."""


@dataclass
class Rows:
    """The descriptors of one batch: the k-th local one is read from the k-th remote one."""

    owner: str
    local_kind: str
    remote_kind: str
    local: list[Row] = field(default_factory=list)
    remote: list[Row] = field(default_factory=list)
    nbytes: int = 0


def check_copies(
    copies: Iterable[Copy],
    targets: Sequence[BufferInfo],
    sources: Mapping[str, Sequence[BufferInfo]],
) -> None:
    """Refuse copies that leave their buffers.

    Args:
        copies: The plan; every owner of it is in ``sources``.
        targets: The reader's buffers.
        sources: Each owner's buffers.

    Raises:
        OutOfBounds: Names the copy, the buffer and its size.
    """
    sizes = {name: [buffer.nbytes for buffer in own] for name, own in sources.items()}
    bounds.check_copies(copies, [buffer.nbytes for buffer in targets], sizes, backend=BACKEND)


def batch(
    copies: Iterable[Copy],
    targets: Sequence[BufferInfo],
    sources: Mapping[str, Sequence[BufferInfo]],
) -> list[Rows]:
    """Group checked copies into batches of bounded size, the owners taking turns."""
    full: dict[str, list[Rows]] = {}
    growing: dict[tuple[str, str, str], Rows] = {}
    for copy in _cut(_merge(copies)):
        source, target = sources[copy.owner][copy.source], targets[copy.target]
        key = (copy.owner, target.kind, source.kind)
        rows = growing.get(key)
        if rows is None or rows.nbytes + copy.nbytes > CHUNK_BYTES or len(rows.local) >= MAX_ROWS:
            rows = growing[key] = Rows(*key)
            full.setdefault(copy.owner, []).append(rows)
        rows.local.append((target.address + copy.target_offset, copy.nbytes, target.device))
        rows.remote.append((source.address + copy.source_offset, copy.nbytes, source.device))
        rows.nbytes += copy.nbytes
    turns = zip_longest(*full.values())
    return [rows for turn in turns for rows in turn if rows is not None]


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


def _cut(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Cut what is longer than a chunk, or lies in two pieces of a registration at either side."""
    piece = info.PIECE_BYTES
    for copy in copies:
        source, target, left = copy.source_offset, copy.target_offset, copy.nbytes
        while left:
            nbytes = min(left, CHUNK_BYTES, piece - source % piece, piece - target % piece)
            yield replace(copy, source_offset=source, target_offset=target, nbytes=nbytes)
            source, target, left = source + nbytes, target + nbytes, left - nbytes
