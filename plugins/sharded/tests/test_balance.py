"""Shares of bytes, against the optimum, which is known by duality.

The busiest rank of the best sharing gives as much as the densest set of ranks must: what only its
members have, per member. With few ranks all sets can be tried.
"""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_wt_sharded.balance import Group, shared


def optimum(groups, base):
    ranks = range(len(base))
    return max(
        (sum(base[list(some)]) + sum(g.nbytes for g in groups if {*g.owners} <= {*some})) / count
        for count in range(1, len(base) + 1)
        for some in combinations(ranks, count)
    )


def group(*owners, nbytes, far=None):
    return Group(owners, nbytes, far or (0,) * len(owners))


@st.composite
def problems(draw):
    ranks = draw(st.integers(1, 6))
    owners = st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted)
    groups = draw(st.lists(st.tuples(owners, st.integers(0, 10**12)), max_size=10))
    base = draw(st.lists(st.integers(0, 10**12), min_size=ranks, max_size=ranks))
    return [group(*own, nbytes=nbytes) for own, nbytes in groups], np.array(base)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_as_good_as_can_be(problem):
    groups, base = problem
    found = shared(groups, base, 0)
    best = optimum(groups, base)
    assert found.bound <= best * (1 + 1e-9)
    assert found.busiest <= best * 1.0021
    assert found.busiest <= found.bound * 1.01 + 1
    loads = base.astype(float)
    for own, given_ in zip(groups, found.given, strict=True):
        assert min(given_) >= 0
        assert sum(given_) == pytest.approx(own.nbytes, abs=1)
        loads[list(own.owners)] += given_
    assert loads == pytest.approx(found.loads, rel=1e-6, abs=10)


@pytest.mark.parametrize("length", [2, 30, 200])
def test_along_a_chain(length):
    """What one end has too much of has to be handed on from one to the next."""
    groups = [
        group(i, i + 1, nbytes=10**9 if i < length // 8 + 1 else 10**6) for i in range(length - 1)
    ]
    found = shared(groups, np.zeros(length, dtype=np.int64), 0)
    assert found.busiest <= found.bound * 1.01


def test_many_groups():
    random = np.random.default_rng(0)
    groups = [
        group(
            *sorted(random.choice(64, 3, replace=False).tolist()), nbytes=int(random.integers(1000))
        )
        for _ in range(5000)
    ]
    found = shared(groups, np.zeros(64, dtype=np.int64), 0)
    assert found.busiest <= found.bound * 1.01


def test_near_ones_give_all_that_the_busiest_worker_may_take_anyway():
    own = group(0, 1, nbytes=100, far=(0, 1))
    assert shared([own], np.zeros(2, dtype=np.int64), 100).given[0] == pytest.approx([100, 0])


def test_far_ones_help_when_near_ones_are_too_busy():
    groups = [group(0, 1, nbytes=100, far=(0, 3)), group(0, nbytes=60)]
    found = shared(groups, np.zeros(2, dtype=np.int64), 100)
    assert found.busiest <= 100.3
    assert found.given[0][0] >= 30


def test_as_near_ones_share_evenly():
    own = group(0, 1, 2, nbytes=100, far=(1, 0, 0))
    assert shared([own], np.zeros(3, dtype=np.int64), 100).given[0] == pytest.approx([0, 50, 50])
