"""From copies to runs of bytes between addresses: checked, merged, cut into parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm_wt.errors import OutOfBounds
from vllm_wt.packing.host import Run
from vllm_wt.transport import Copy
from vllm_wt_ipc import BACKEND

PART_BYTES = 64 << 20
"""Most bytes that are copied between two looks at the time: some 10 ms on a host."""
PART_RUNS = 1 << 14
"""Most runs, since very short ones take about a microsecond each."""


def check_copies(
    copies: Iterable[Copy], targets: Sequence[int], sources: Mapping[str, Sequence[int]]
) -> None:
    """Refuse copies that leave their buffers.

    Args:
        copies: The plan; every owner of it is in ``sources``.
        targets: Sizes of the reader's buffers.
        sources: Sizes of each owner's buffers.

    Raises:
        OutOfBounds: Names the copy, the buffer and its size.
    """
    for number, copy in enumerate(copies):
        _check_end(number, copy, "source", copy.source, copy.source_offset, sources[copy.owner])
        _check_end(number, copy, "target", copy.target, copy.target_offset, targets)


def _check_end(
    number: int, copy: Copy, side: str, index: int, offset: int, sizes: Sequence[int]
) -> None:
    if not 0 <= index < len(sizes):
        expected, got = f"a {side} buffer below {len(sizes)}", f"{side} buffer {index}"
    elif copy.nbytes < 1:
        expected, got = "at least 1 byte", f"{copy.nbytes} bytes"
    elif not 0 <= offset <= sizes[index] - copy.nbytes:
        expected = f"within the {sizes[index]} bytes of {side} buffer {index}"
        got = f"{copy.nbytes} bytes from offset {offset}"
    else:
        return
    raise OutOfBounds(
        f"Copy {number} from owner {copy.owner!r} leaves the {side} memory",
        backend=BACKEND,
        where=f"copy {number}",
        expected=expected,
        got=got,
        cure="both sides must describe the same tensors; connect again",
    )


def runs_of(
    copies: Iterable[Copy], targets: Sequence[int], sources: Mapping[str, Sequence[int]]
) -> list[Run]:
    """Checked copies as runs between addresses, neighbours on both sides made one.

    Args:
        copies: The plan.
        targets: Addresses of the reader's buffers.
        sources: Addresses of each owner's buffers, in this process.
    """
    runs: list[Run] = []
    for copy in copies:
        to = targets[copy.target] + copy.target_offset
        source = sources[copy.owner][copy.source] + copy.source_offset
        last = runs[-1] if runs else Run(0, 0, 0)
        if (last.to + last.nbytes, last.source + last.nbytes) == (to, source):
            runs[-1] = Run(last.to, last.source, last.nbytes + copy.nbytes)
        else:
            runs.append(Run(to, source, copy.nbytes))
    return runs


def parts_of(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs cut and grouped into parts of bounded size."""
    parts: list[list[Run]] = []
    room = 0
    for run in _cut(runs):
        if run.nbytes > room or len(parts[-1]) >= PART_RUNS:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(run)
        room -= run.nbytes
    return parts


def _cut(runs: Iterable[Run]) -> Iterator[Run]:
    for to, source, nbytes in runs:
        for done in range(0, nbytes, PART_BYTES):
            yield Run(to + done, source + done, min(PART_BYTES, nbytes - done))
