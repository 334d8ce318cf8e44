"""From copies to batches."""

from __future__ import annotations

import pytest

from vllm_wt.errors import OutOfBounds
from vllm_wt.transport import Copy
from vllm_wt_rdma import batching, info
from vllm_wt_rdma.batching import Rows, batch, check_copies
from vllm_wt_rdma.info import BufferInfo


def host(address: int, nbytes: int) -> BufferInfo:
    return BufferInfo(address=address, nbytes=nbytes, device=0, kind="DRAM")


TARGETS = [host(100_000, 1000), host(200_000, 1000)]
SOURCES = {"a": [host(1000, 500), host(2000, 500)], "b": [host(5000, 500)]}


def run(*copies: Copy) -> list[Rows]:
    check_copies(copies, TARGETS, SOURCES)
    return batch(copies, TARGETS, SOURCES)


def test_no_copies_make_no_batches() -> None:
    assert run() == []


def test_neighbours_on_both_sides_become_one_read() -> None:
    (rows,) = run(Copy("a", 0, 3, 0, 7, 10), Copy("a", 0, 13, 0, 17, 5), Copy("a", 0, 18, 0, 22, 1))
    assert rows.remote == [(1003, 16, 0)]
    assert rows.local == [(100_007, 16, 0)]
    assert rows.nbytes == 16


@pytest.mark.parametrize(
    "second",
    [
        Copy("a", 0, 14, 0, 17, 5),  # a gap in the source
        Copy("a", 0, 13, 0, 18, 5),  # a gap in the target
        Copy("a", 0, 12, 0, 17, 5),  # an overlap in the source
        Copy("a", 1, 13, 0, 17, 5),
        Copy("a", 0, 13, 1, 17, 5),
    ],
)
def test_what_is_not_contiguous_on_both_sides_stays_apart(second: Copy) -> None:
    (rows,) = run(Copy("a", 0, 3, 0, 7, 10), second)
    assert [length for _, length, _ in rows.remote] == [10, 5]
    assert [length for _, length, _ in rows.local] == [10, 5]


def test_long_runs_are_cut_and_batches_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "CHUNK_BYTES", 100)
    made = run(Copy("a", 0, 0, 0, 0, 250), Copy("a", 1, 0, 0, 400, 60))
    assert [rows.nbytes for rows in made] == [100, 100, 50, 60]
    assert [r for rows in made for r in rows.remote] == [
        (1000, 100, 0),
        (1100, 100, 0),
        (1200, 50, 0),
        (2000, 60, 0),
    ]
    assert [r for rows in made for r in rows.local] == [
        (100_000, 100, 0),
        (100_100, 100, 0),
        (100_200, 50, 0),
        (100_400, 60, 0),
    ]


def test_a_batch_has_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_ROWS", 3)
    made = run(*(Copy("a", 0, 2 * i, 0, 3 * i, 1) for i in range(7)))
    assert [len(rows.local) for rows in made] == [3, 3, 1]


def test_owners_and_kinds_of_memory_have_batches_of_their_own_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "CHUNK_BYTES", 100)
    made = run(Copy("a", 0, 0, 0, 0, 300), Copy("b", 0, 0, 0, 300, 150))
    assert [rows.owner for rows in made] == ["a", "b", "a", "b", "a"]
    device = BufferInfo(address=9000, nbytes=50, device=1, kind="VRAM")
    mixed = batch(
        [Copy("a", 0, 0, 0, 0, 10), Copy("a", 1, 0, 0, 10, 10)],
        TARGETS,
        {"a": [SOURCES["a"][0], device]},
    )
    assert [(rows.remote_kind, rows.remote) for rows in mixed] == [
        ("DRAM", [(1000, 10, 0)]),
        ("VRAM", [(9000, 10, 1)]),
    ]


@pytest.mark.parametrize(
    ("copy", "side"),
    [
        (Copy("a", 2, 0, 0, 0, 1), "source"),
        (Copy("a", -1, 0, 0, 0, 1), "source"),
        (Copy("a", 0, -1, 0, 0, 1), "source"),
        (Copy("a", 0, 500, 0, 0, 1), "source"),
        (Copy("a", 0, 0, 0, 0, 501), "source"),
        (Copy("a", 0, 0, 0, 0, 0), "source"),
        (Copy("a", 0, 0, 0, 0, -5), "source"),
        (Copy("a", 0, 0, 2, 0, 1), "target"),
        (Copy("a", 0, 0, -1, 0, 1), "target"),
        (Copy("a", 0, 0, 0, -1, 1), "target"),
        (Copy("a", 0, 0, 0, 1000, 1), "target"),
        (Copy("a", 0, 0, 0, 999, 2), "target"),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused(copy: Copy, side: str) -> None:
    with pytest.raises(OutOfBounds) as caught:
        check_copies([Copy("a", 0, 0, 0, 0, 500), copy], TARGETS, SOURCES)
    assert caught.value.where == "copy 1"
    assert f"the {side} memory" in caught.value.what
    assert caught.value.expected
    assert caught.value.got


def test_the_last_byte_of_both_sides_is_within() -> None:
    check_copies([Copy("a", 0, 499, 0, 999, 1), Copy("b", 0, 0, 1, 500, 500)], TARGETS, SOURCES)


def test_no_read_crosses_from_one_registered_piece_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(info, "PIECE_BYTES", 100)
    (rows,) = run(Copy("a", 0, 90, 0, 130, 200))
    assert rows.remote == [
        (1090, 10, 0),
        (1100, 60, 0),  # to the end of the target's piece
        (1160, 40, 0),
        (1200, 60, 0),
        (1260, 30, 0),
    ]
    assert rows.local == [
        (100_130, 10, 0),
        (100_140, 60, 0),
        (100_200, 40, 0),
        (100_240, 60, 0),
        (100_300, 30, 0),
    ]
