"""By what UCX reads each kind of memory of another process, as its log says: for ``vllm-wt doctor``.

NIXL does not pass on what UCX has chosen. UCX tells in its log, which in a trainer or worker is the
user's; the doctor's process has one of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_wt.cli.doctor.finding import Finding
from vllm_wt_rdma import doctor
from vllm_wt_rdma.endpoint import Endpoint

_TITLE = re.compile(r"remote memory read by ucp_get\S* into (\w+)\b.* from (\w+)")
_EMULATED = "software emulation"
"""UCX's own words."""

Reads = Mapping[tuple[str, str], Sequence[str]]
"""By the kinds of memory that are written and read, in UCX's words: what does it, for each size."""


def findings(kinds: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Read from each kind of memory into the others, too, and tell what UCX has chosen for all."""
    log = folder / f"ucx-{os.getpid()}.log"
    seen = len(doctor.text_of(log))
    for kind in kinds:
        for into in kinds:
            if into == kind:
                continue
            try:
                doctor.exchange(
                    Endpoint(f"doctor-{kind}-{into}"), doctor.device_of(into), kind, folder
                )
            except Exception as error:
                words = doctor.text_of(log)[seen:]
                found = doctor.problem(f"read-{kind}-into-{into}", error, words)
                yield replace(found, status="warning")  # most syncs do without
    yield judge(reads_of(doctor.text_of(log)))


def reads_of(log: str) -> Reads:
    """The tables of reads in a log with UCX_PROTO_INFO; of those for the same kinds the last one."""
    found: dict[tuple[str, str], list[str]] = {}
    rows: list[str] = []
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")[:-1]]
        if 1 <= len(cells) <= 2 and "by ucp_" in cells[-1]:  # in some releases behind a name
            title = _TITLE.search(cells[-1])
            rows = []
            if title is not None:
                found[title[1], title[2]] = rows
        elif len(cells) == 3 and cells[0] not in {"Range", "0"}:
            path = f"{cells[2]} ({_EMULATED})" if _EMULATED in cells[1] else cells[2]
            if path not in rows:
                rows.append(path)
    return found


def judge(reads: Reads) -> Finding:
    """Emulation between memory of one kind is a mistake; between host and GPU there is nothing else
    unless a network adapter does it."""
    if not reads:
        return Finding("chosen", "skipped", "UCX's log names no reads")
    found = "; ".join(
        f"{into} memory from {origin} by {', '.join(paths)}"
        for (into, origin), paths in reads.items()
    )
    slow = [into for (into, origin), paths in reads.items() if into == origin and _is_slow(paths)]
    if slow:
        cure = "see " + " and ".join("read-cuda" if kind == "cuda" else "read-cpu" for kind in slow)
        return Finding("chosen", "warning", f"within this host: {found}", cure)
    return Finding("chosen", "ok", f"within this host: {found}")


def _is_slow(paths: Sequence[str]) -> bool:
    """For long reads, which come last."""
    return bool(paths) and _EMULATED in paths[-1]
