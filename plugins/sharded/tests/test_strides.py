"""Strided copies as rows, and rows as few strided copies: every element goes where it went."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from vllm_wt.loading.plan import Copy
from vllm_wt_sharded.strides import Regular, regular, rows_of

from .support.instances import SEEDS
from .support.loads import copy_of, moves, numbered


def cells(parts):
    """Which element goes where, in the order of the parts."""
    return [
        pair
        for part in parts
        for pair in moves(
            Copy(
                *("x", part.source, tuple(source for _, source, _ in part.dims), (), "m", "p"),
                *(part.dest, tuple(dest for _, _, dest in part.dims), "int64"),
                tuple(count for count, _, _ in part.dims),
            )
        )
    ]


def each_row(rows):
    """The same of rows."""
    return [
        (source + step, dest + step * rows.stride)
        for source, dest in zip(rows.source.tolist(), rows.dest.tolist(), strict=True)
        for step in range(rows.length)
    ]


def some_copy(random):
    """One that may be transposed, padded, repeated or all of these."""
    dims = random.randint(0, 4)
    shape = [random.randint(1, 5) for _ in range(dims)]
    strides, dest = [], []
    step = there = 1
    for size in reversed(shape):
        strides.append(0 if random.random() < 0.1 else step)
        dest.append(there)
        step *= size
        step += random.choice([0, 0, 1, 3])
        there *= size
        there += random.choice([0, 0, 2])
    order = random.sample(range(dims), dims) if random.random() < 0.5 else range(dims)[::-1]
    if random.random() < 0.5:
        random.shuffle(dest)
    return Copy(
        *("x", random.randint(0, 9), tuple(strides[i] for i in order), (), "m", "p", 0),
        *(tuple(dest[i] for i in order), "int64", tuple(shape[::-1][i] for i in order)),
    )


@given(SEEDS)
@settings(max_examples=400, deadline=None)
def test_rows_are_the_copy(seed):
    copy = some_copy(Random(seed))
    rows = rows_of(copy)
    assert sorted(each_row(rows)) == sorted(moves(copy))
    if 1 in copy.source_strides:
        longest = max(n for n, s in zip(copy.shape, copy.source_strides, strict=True) if s == 1)
        assert rows.length == longest


@given(SEEDS)
@settings(max_examples=400, deadline=None)
def test_regular_rows_are_the_rows_in_their_order(seed):
    rows = rows_of(some_copy(Random(seed)))
    length = np.full(len(rows.source), rows.length)
    assert cells(regular(rows.source, rows.dest, length, rows.stride)) == each_row(rows)


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_rows_of_unequal_length(seed):
    """As where boxes end in the middle of a row, each at its own place."""
    random = Random(seed)
    rows = rows_of(some_copy(random))
    source, dest, length = [], [], []
    for first, there in zip(rows.source.tolist(), rows.dest.tolist(), strict=True):
        inner = random.sample(range(1, rows.length), random.randint(0, min(2, rows.length - 1)))
        for begin, end in zip([0, *sorted(inner)], [*sorted(inner), rows.length], strict=True):
            source.append(first + begin)
            dest.append(there + begin * rows.stride)
            length.append(end - begin)
    found = regular(np.array(source), np.array(dest), np.array(length), rows.stride)
    assert cells(found) == each_row(rows)


EVEN = {
    "whole": lambda x: x,
    "columns": lambda x: x[:, 5:9],
    "every other row": lambda x: x[1:7:2],
    "every third column": lambda x: x[:, ::3],
    "transposed": lambda x: x.t(),
    "interleaved": lambda x: x.view(4, 2, 6, 2)[:, 1],
    "permuted": lambda x: x.view(4, 2, 6, 2).permute(2, 0, 1, 3),
    "repeated": lambda x: x[3, 3:4].expand(7),
    "scalar": lambda x: x[0, 0],
}


@pytest.mark.parametrize("view", EVEN.values(), ids=EVEN)
def test_even_rows_become_one_copy(view):
    source = view(numbered((8, 12)))
    copy = copy_of(source, torch.empty(source.shape))
    rows = rows_of(copy)
    found = regular(rows.source, rows.dest, np.full(len(rows.source), rows.length), rows.stride)
    assert sorted(cells(found)) == sorted(moves(copy))
    assert len(found) == 1


def test_a_matrix_is_one_run():
    copy = copy_of(numbered((8, 12)), torch.empty(8, 12))
    rows = rows_of(copy)
    found = regular(rows.source, rows.dest, np.full(8, 12), 1)
    assert found == [Regular(0, 0, ((96, 1, 1),))]


def test_rows_of_two_spacings_become_two():
    source = np.array([0, 10, 20, 23, 26])
    dest = np.arange(5) * 2
    assert regular(source, dest, np.full(5, 2), 1) == [
        Regular(0, 0, ((3, 10, 2), (2, 1, 1))),
        Regular(23, 6, ((2, 3, 2), (2, 1, 1))),
    ]


def test_no_rows():
    nothing = np.empty(0, dtype=np.int64)
    assert regular(nothing, nothing, nothing, 1) == []
