"""From checked copies to runs of bytes between addresses: merged, cut into parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm_wt.packing.host import Run
from vllm_wt.transport import Copy

PART_BYTES = 64 << 20
"""Most bytes that are copied between two looks at the time: some 10 ms on a host."""
PART_RUNS = 1 << 14
"""Most runs, since very short ones take about a microsecond each."""


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
