"""Equal rows get equal numbers, whatever their hashes, in whatever chunks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_wt_sharded import patterns
from vllm_wt_sharded.patterns import numbered, numbered_lists

TABLES = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=30)


@pytest.fixture(params=["hashed", "all collide"])
def hashes(request, monkeypatch):
    if request.param == "all collide":
        monkeypatch.setattr(
            patterns, "_hashed", lambda columns: np.zeros(len(columns[0]), np.uint64)
        )


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.usefixtures("hashes")
def test_numbered(monkeypatch, chunk):
    monkeypatch.setattr(patterns, "_CHUNK", chunk)

    @given(TABLES)
    @settings(max_examples=50, deadline=None)
    def check(table):
        columns = np.array(table, dtype=np.int64).reshape(-1, 2).T
        numbers, firsts = numbered([columns[0].astype(np.int32), columns[1]])
        distinct = list(dict.fromkeys(table))
        assert numbers.tolist() == [distinct.index(row) for row in table]
        assert firsts.tolist() == [table.index(row) for row in distinct]

    check()


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=20))
@settings(max_examples=100, deadline=None)
def test_numbered_lists(lists):
    values = np.array([value for each in lists for value in each], dtype=np.int64)
    first = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    numbers, found = numbered_lists(values, first)
    assert [found[number].tolist() for number in numbers.tolist()] == lists
    assert len(found) == len({tuple(each) for each in lists})
    assert [len(each) for each in found] == sorted(len(each) for each in found)
