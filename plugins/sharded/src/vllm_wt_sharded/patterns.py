"""Equal rows and equal groups of rows, numbered: what is planned once for many tensors.

A model of 70,000 tensors has a few dozen ways in which tensors are cut. Rows are compared by a hash
of 64 bits, since sorting millions of rows by many columns takes far longer; every match is then
compared in full, so that a collision costs time and never a wrong answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_CHUNK = 1 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def numbered(columns: list[npt.NDArray[np.integer]]) -> tuple[Ints, Ints]:
    """Number the distinct rows of a table, in the order of their first occurrence.

    Args:
        columns: Integer arrays (n,), at least one.

    Returns:
        (n,) the number of each row, and (k,) the first row of each number.
    """
    count = len(columns[0])
    known: dict[tuple[int, ...], int] = {}
    numbers = np.empty(count, dtype=np.int64)
    firsts: list[int] = []
    for begin in range(0, count, _CHUNK):
        part = [column[begin : begin + _CHUNK] for column in columns]
        _, first, inverse = np.unique(_hashed(part), return_index=True, return_inverse=True)
        if any((column[first][inverse] != column).any() for column in part):  # a collision
            _, first, inverse = np.unique(
                np.stack(part, axis=1), axis=0, return_index=True, return_inverse=True
            )
        rows = np.stack([column[first] for column in part], axis=1)
        own = np.empty(len(first), dtype=np.int64)
        for i in np.argsort(first).tolist():
            key = tuple(rows[i].tolist())
            if key not in known:
                known[key] = len(firsts)
                firsts.append(begin + int(first[i]))
            own[i] = known[key]
        numbers[begin : begin + _CHUNK] = own[inverse.reshape(-1)]
    return numbers, np.array(firsts, dtype=np.int64)


def numbered_lists(values: Ints, first: Ints) -> tuple[Ints, list[Ints]]:
    """Number distinct lists of integers, shorter ones first.

    Args:
        values: All lists, one after the other.
        first: (n + 1,), where each begins.

    Returns:
        (n,) the number of each list, and the list of each number.
    """
    counts = np.diff(first)
    numbers = np.empty(len(counts), dtype=np.int64)
    found: list[Ints] = []
    for count in np.unique(counts).tolist():
        which = np.flatnonzero(counts == count)
        own = values[first[which, None] + np.arange(count)]
        # A column of zeros, since a list may be empty.
        own_numbers, firsts = numbered([np.zeros(len(own), dtype=np.int64), *own.T])
        numbers[which] = own_numbers + len(found)
        found.extend(own[firsts])
    return numbers, found


def _hashed(columns: list[npt.NDArray[np.integer]]) -> npt.NDArray[np.uint64]:
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * _GOLDEN
        mixed ^= mixed >> np.uint64(29)
    return mixed
