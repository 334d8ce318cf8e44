"""Which messages count as reports."""

from __future__ import annotations

import pytest

from vllm_wt_rdma.tickets import Tickets, message


def test_reports_are_kept_by_ticket() -> None:
    tickets = Tickets()
    tickets.add({"r0": [message("r0", 4)], "r1": [message("r1", 4), message("r1", 5)]})
    assert tickets.readers(4) == {"r0", "r1"}
    assert tickets.readers(5) == {"r1"}
    assert tickets.readers(6) == frozenset()
    assert tickets.garbage == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"r0",
        b"r0|",
        b"|4",
        b"r0|-4",
        b"r0|+4",
        b"r0|04",
        b"r0|4 ",
        b"r0|4\n",
        b"r0|4|4",
        b"r0|4.0",
        b"r1|4",  # in another's name
        b"r0|" + b"9" * 30,
        "r0|\u0664".encode(),  # a digit, but not ours
        b"\xff\xfe|4",
        b"x" * 200 + b"|4",
    ],
)
def test_garbage_is_counted_and_ignored(text: bytes) -> None:
    tickets = Tickets()
    tickets.add({"r0": [text]})
    assert tickets.garbage == 1
    assert tickets.readers(4) == frozenset()


def test_only_the_latest_tickets_are_remembered() -> None:
    tickets = Tickets()
    for ticket in range(1, 101):
        tickets.add({"r0": [message("r0", ticket)]})
    assert tickets.readers(100) == tickets.readers(93) == {"r0"}
    assert tickets.readers(92) == frozenset()
    tickets.add({"r0": [message("r0", 5)]})
    assert tickets.readers(5) == frozenset()
    assert tickets.readers(100) == {"r0"}
