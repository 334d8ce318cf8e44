"""Plans of random layouts, carried out on arrays; and what holds when workers come and go."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.places import Place, Places
from vllm_wt_sharded.planner import lower_bounds, plan, with_workers

from .support.instances import instance, instances, replay

COLUMNS = ("need", "source_row", "source_rank", "tensor", "start", "size", "nbytes")
PLACES = Places(
    {rank: Place(f"h{rank // 2}", f"gpu{rank % 2}", rank % 2) for rank in range(6)},
    {worker: Place(f"h{worker}", "gpu0", worker % 2) for worker in range(4)},
)


def some(layout, ranks):
    """The rows of some ranks, as a layout."""
    own = np.isin(layout.rank, ranks)
    return Layout(layout.tensors, *(column[own] for column in layout.columns()))


def assert_same(one, other):
    assert one.worker == other.worker
    for name in COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def require_right(found, source, needs):
    """Everything that is needed comes once, from one that has it, and is counted."""
    got, times, wanted = replay(found, source, needs)
    for one, count, other in zip(got, times, wanted, strict=True):
        assert (count == 1).all()
        assert np.array_equal(one, other)
    for i, worker in enumerate(found.workers):
        rows = found.for_worker(worker)
        assert np.array_equal(rows.source_rank, source.rank[rows.source_row])
        itemsize = source.itemsizes[rows.tensor]
        assert np.array_equal(rows.nbytes, rows.size.prod(axis=1) * itemsize)
        by_rank = np.bincount(rows.source_rank, rows.nbytes, source.ranks)
        assert np.array_equal(found.matrix[:, i], by_rank)
    assert np.array_equal(found.bytes_out, found.matrix.sum(axis=1))
    assert np.array_equal(found.bytes_in, found.matrix.sum(axis=0))


@pytest.mark.parametrize("places", [None, PLACES], ids=["anywhere", "in places"])
@pytest.mark.parametrize("rows", [1, 30])
def test_every_need_is_met_once(rows, places):
    @given(instances(rows))
    @settings(max_examples=80, deadline=None)
    def check(layouts):
        source, needs = layouts
        require_right(plan(source, needs, places=places), source, needs)

    check()


@given(instances(5))
@settings(max_examples=50, deadline=None)
def test_order_and_neighbours(layouts):
    source, needs = layouts
    found = plan(source, needs)
    for worker in found.workers:
        rows = found.for_worker(worker)
        layers = [int(source.tensors[t].name.split(".")[1]) for t in rows.tensor.tolist()]
        assert layers == sorted(layers)
        assert len(list(itertools.groupby(rows.tensor.tolist()))) == len(set(rows.tensor.tolist()))
        for i, j in itertools.permutations(range(len(rows)), 2):
            if rows.need[i] == rows.need[j] and rows.source_row[i] == rows.source_row[j]:
                assert not neighbours(rows, i, j), "two rows that could be one"


def neighbours(rows, i, j):
    """Whether row j continues row i along one dimension."""
    differ = (rows.start[i] != rows.start[j]) | (rows.size[i] != rows.size[j])
    meets = rows.start[i] + rows.size[i] == rows.start[j]
    return any(meets[d] and not np.delete(differ, d).any() for d in range(rows.start.shape[1]))


@given(instances(20))
@settings(max_examples=30, deadline=None)
def test_the_same_again(layouts):
    source, needs = layouts
    one = plan(source, needs, places=PLACES)
    other = plan(
        Layout.from_wire(source.to_wire()), Layout.from_wire(needs.to_wire()), places=PLACES
    )
    assert one.digest == other.digest
    for worker in one.workers:
        assert_same(one.for_worker(worker), other.for_worker(worker))


def test_what_a_plan_is_does_not_depend_on_plans_before():
    """A layout keeps what it has worked out; that must not change what comes later."""
    meta = [TensorMeta("w", "int8", (64, 8))]
    source = Layout.of(meta, [("w", rank, (0, 0), (64, 8)) for rank in range(4)])
    needs = Layout.of(meta, [("w", worker, (worker, 0), (50, 8)) for worker in range(3)])
    before = plan(source, needs).digest
    plan(source, Layout.of(meta, [("w", 9, (3, 3), (5, 5)), ("w", 0, (0, 0), (1, 1))]))
    assert plan(source, needs).digest == before


@given(instances(1000))
@settings(max_examples=50, deadline=None)
def test_the_busiest_source_is_as_idle_as_can_be(layouts):
    source, needs = layouts
    found = plan(source, needs)
    out, into = lower_bounds(source, needs)
    assert found.bytes_in.max(initial=0) == into
    # A piece is cut between rows of its first dimension alone, once between two owners in turn:
    # what that can add is less than a row of each need, here at most 36 elements of 4 bytes.
    assert found.bytes_out.max(initial=0) <= 1.05 * out + 36 * 4 * len(needs)


def test_large_pieces_are_divided():
    meta = [TensorMeta("w", "bfloat16", (1000, 64))]
    source = Layout.of(meta, [("w", rank, (0, 0), (1000, 64)) for rank in range(4)])
    found = plan(source, Layout.of(meta, [("w", 0, (0, 0), (1000, 64))]))
    assert found.bytes_out.tolist() == [32000] * 4
    assert len(found.for_worker(0)) == 4


def test_what_one_worker_takes_goes_on_where_the_last_one_ended():
    metas = [TensorMeta("a", "int8", (200, 8)), TensorMeta("b", "int8", (300, 8))]
    rows = [("a", rank, (0, 0), (200, 8)) for rank in (0, 1)]
    rows += [("b", rank, (0, 0), (300, 8)) for rank in (2, 3, 4)]
    needs = [(m.name, worker, (0, 0), m.shape) for m in metas for worker in range(3)]
    found = plan(Layout.of(metas, rows), Layout.of(metas, needs))
    assert found.bytes_out.tolist() == pytest.approx([2400] * 5, abs=3 * 8)


def test_no_slivers():
    """Wherever the owners' parts meet, a piece is not cut near its end."""
    whole = 100_000
    for size in range(whole // 2, 3 * whole // 2, 180):
        metas = [TensorMeta("a", "int8", (size,)), TensorMeta("b", "int8", (whole,))]
        rows = [(meta.name, rank, (0,), meta.shape) for meta in metas for rank in (0, 1)]
        needs = [(meta.name, 0, (0,), meta.shape) for meta in metas]
        found = plan(Layout.of(metas, rows), Layout.of(metas, needs))
        assert found.for_worker(0).nbytes.min() >= (size + whole) / 2 / 1024 - 1
        assert found.skew()[0] <= 1.01


def test_small_pieces_are_not():
    meta = [TensorMeta(f"w{i}", "int8", (100,)) for i in range(800)]
    source = Layout.of(meta, [(m.name, rank, (0,), (100,)) for m in meta for rank in range(3)])
    found = plan(source, Layout.of(meta, [(m.name, 0, (0,), (100,)) for m in meta]))
    rows = found.for_worker(0)
    assert len(rows) == 800
    assert found.skew()[0] <= 1.01
    # At any time the worker takes from all of them.
    for begin in range(0, 800, 100):
        assert len(set(rows.source_rank[begin : begin + 100].tolist())) == 3


def test_uneven_replicas():
    """One rank alone has a half; the other half, all four have: they leave it to the other three."""
    meta = [TensorMeta(f"w{i}", "int8", (64, 64)) for i in range(400)]
    rows = [(m.name, 0, (0, 0), (64, 64)) for m in meta]
    rows += [(m.name, rank, (0, 0), (64, 64)) for m in meta[200:] for rank in (1, 2, 3)]
    found = plan(
        Layout.of(meta, rows), Layout.of(meta, [(m.name, 0, (0, 0), (64, 64)) for m in meta])
    )
    share = 200 * 64 * 64
    assert found.bytes_out[0] == share
    assert found.bytes_out[1:] == pytest.approx([share / 3] * 3, rel=0.03)


def test_sets_of_owners_that_are_all_different():
    """Rounding to whole pieces favours nobody, though each set of owners has one piece alone."""
    triples = list(itertools.combinations(range(24), 3))
    metas = [TensorMeta(f"w{i}", "int8", (1,)) for i in range(len(triples))]
    rows = [
        (meta.name, rank, (0,), (1,))
        for meta, triple in zip(metas, triples, strict=True)
        for rank in triple
    ]
    needs = [(meta.name, 0, (0,), (1,)) for meta in metas]
    found = plan(Layout.of(metas, rows), Layout.of(metas, needs))
    assert found.skew()[0] <= 1.05


def test_groups_do_not_all_begin_with_their_first_owner():
    triples = list(itertools.combinations(range(6), 3))
    metas = [TensorMeta(f"w{i}", "int8", (8,)) for i in range(60 * len(triples))]
    owners = [triples[i % len(triples)] for i in range(len(metas))]
    rows = [(m.name, r, (0,), (8,)) for m, own in zip(metas, owners, strict=True) for r in own]
    needs = [(meta.name, 0, (0,), (8,)) for meta in metas]
    found = plan(Layout.of(metas, rows), Layout.of(metas, needs)).for_worker(0)
    others = [rank != own[0] for rank, own in zip(found.source_rank.tolist(), owners, strict=False)]
    assert sum(others[: len(triples)]) >= len(triples) / 3


def test_bytes_stay_on_the_device_where_they_can():
    metas = [TensorMeta(f"w{i}", "int8", (64,)) for i in range(50)]
    source = Layout.of(metas, [(m.name, rank, (0,), (64,)) for m in metas for rank in range(8)])
    needs = Layout.of(metas, [(m.name, worker, (0,), (64,)) for m in metas for worker in range(4)])
    here = {rank: Place("h0", f"gpu{rank}") for rank in range(4)}
    there = {rank: Place("h1", f"gpu{rank}") for rank in range(4, 8)}
    found = plan(source, needs, places=Places({**here, **there}, here))
    assert np.array_equal(found.matrix, np.eye(8, 4, dtype=np.int64) * 50 * 64)


def test_the_near_source_is_not_overloaded():
    """Four workers are beside one of two sources; that one gives no more than its half."""
    metas = [TensorMeta(f"w{i}", "int8", (64, 64)) for i in range(50)]
    source = Layout.of(metas, [(m.name, rank, (0, 0), (64, 64)) for m in metas for rank in (0, 1)])
    needs = [(m.name, worker, (0, 0), (64, 64)) for m in metas for worker in range(4)]
    workers = {worker: Place("h0") for worker in range(4)}
    places = Places({0: Place("h0"), 1: Place("h1")}, workers)
    found = plan(source, Layout.of(metas, needs), places=places)
    assert found.bytes_out.tolist() == pytest.approx([2 * 50 * 64 * 64] * 2, rel=0.02)


@given(instances(20))
@settings(max_examples=50, deadline=None)
def test_workers_join_and_leave(layouts):
    source, needs = layouts
    first = [worker for worker in range(4) if worker % 2]
    others = [worker for worker in range(4) if not worker % 2]
    before = plan(source, some(needs, first))
    digest = before.digest
    joined = with_workers(before, some(needs, others))
    require_right(joined, source, needs)
    for worker in before.workers:
        assert_same(joined.for_worker(worker), before.for_worker(worker))
    left = joined.without_workers([worker for worker in joined.workers if worker in others])
    assert before.digest == left.digest == digest
    if some(needs, others):
        assert joined.digest != digest
        with pytest.raises(InvalidInfo, match="is in the plan already"):
            with_workers(joined, some(needs, others))


def test_who_joins_takes_from_the_idle():
    meta = [TensorMeta(f"w{i}", "int8", (64, 64)) for i in range(100)]
    source = Layout.of(meta, [(m.name, rank, (0, 0), (64, 64)) for m in meta for rank in (0, 1)])
    near = Places({0: Place("h0"), 1: Place("h1")}, {0: Place("h0")})
    needs = [
        Layout.of(meta, [(m.name, worker, (0, 0), (64, 64)) for m in meta]) for worker in (0, 1)
    ]
    found = plan(source, needs[0], places=near)
    assert found.bytes_out.tolist() == [409600, 0]
    found = with_workers(found, needs[1], places=near)
    assert found.bytes_out.tolist() == [409600, 409600]


def test_unknown_workers():
    source, needs = instance(random.Random(1), 3)
    found = plan(source, needs)
    for call in (found.for_worker, lambda worker: found.without_workers([worker])):
        with pytest.raises(InvalidInfo, match="The plan has no worker 99"):
            call(99)


def test_orphans_are_named():
    metas = [TensorMeta("a", "int8", (8, 4)), TensorMeta("b", "int8", (8, 4))]
    source = Layout.of(metas, [("a", 0, (0, 0), (8, 4)), ("b", 0, (0, 0), (8, 3))])
    needs = [("a", 0, (0, 0), (8, 4)), ("b", 1, (0, 0), (8, 3)), ("b", 2, (2, 2), (3, 2))]
    plan(source, Layout.of(metas, needs[:2]))
    with pytest.raises(ManifestMismatch, match=r"Where: b\[2:5, 3:4\], worker 2"):
        plan(source, Layout.of(metas, [*needs, ("b", 0, (0, 3), (1, 1))]))
    nobody = Layout.of(metas, [])
    with pytest.raises(ManifestMismatch, match=r"Where: a\[0:8, 0:4\], worker 0"):
        plan(nobody, Layout.of(metas, needs))
    with pytest.raises(ManifestMismatch, match=r"Where: a\[0:8, 0:4\], worker 0"):
        lower_bounds(nobody, Layout.of(metas, needs))


def test_of_different_tensors():
    one = Layout.of([TensorMeta("a", "int8", (8,))], [("a", 0, (0,), (8,))])
    other = Layout.of([TensorMeta("a", "uint8", (8,))], [("a", 0, (0,), (8,))])
    for call in (plan, lower_bounds, lambda source, needs: with_workers(plan(one, one), needs)):
        with pytest.raises(ManifestMismatch, match="source and needs"):
            call(one, other)


def test_nothing_needed():
    metas = [TensorMeta("a", "int8", (8,))]
    source = Layout.of(metas, [("a", 0, (0,), (8,))])
    found = plan(source, Layout.of(metas, []))
    assert found.workers == ()
    assert found.busiest == 0
    assert found.skew() == (0, 0)
    assert found.bytes_out.tolist() == [0]


def test_equal_rows_of_one_rank():
    metas = [TensorMeta("a", "int8", (8,))]
    source = Layout.of(metas, [("a", 0, (0,), (8,)), ("a", 0, (0,), (8,)), ("a", 0, (2,), (6,))])
    rows = plan(source, Layout.of(metas, [("a", 0, (0,), (8,))])).for_worker(0)
    assert rows.source_row.tolist() == [0]


def test_digest_tells_plans_apart():
    metas = [TensorMeta("a", "int8", (8, 2)), TensorMeta("b", "int8", (8, 2))]
    whole, half = ((0, 0), (8, 2)), ((0, 0), (4, 2))
    source = [("a", 0, *whole), ("b", 1, *whole)]
    needs = [("a", 0, *whole), ("b", 0, *whole)]
    made = [
        (metas, source, needs),
        (metas, source, needs[:1]),
        (metas, source, needs[::-1]),
        (metas, source, [("a", 0, *half), needs[1]]),
        (metas, source, [("a", 1, *whole), needs[1]]),
        (metas, source[::-1], needs),
        (metas, [("a", 2, *whole), source[1]], needs),
        (metas, [*source, ("b", 1, *half)], needs),
        ([metas[0], TensorMeta("b", "uint8", (8, 2))], source, needs),
    ]
    digests = {plan(Layout.of(m, s), Layout.of(m, n)).digest for m, s, n in made}
    assert len(digests) == len(made)


@given(instances(20))
@settings(max_examples=50, deadline=None)
def test_batches(layouts):
    source, needs = layouts
    found = plan(source, needs)
    for worker, nbytes in itertools.product(found.workers, (1, 200, 3000, 10**9)):
        rows = found.for_worker(worker)
        parts = found.batches(worker, nbytes)
        bounds = [part.start for part in parts] + [len(rows)]
        assert [(part.start, part.stop) for part in parts] == list(itertools.pairwise(bounds))
        assert bounds[0] == 0
        tensors = [rows.tensor[part].tolist() for part in parts]
        assert not any({*one} & {*two} for one, two in itertools.combinations(tensors, 2))
        sizes = [int(rows.nbytes[part].sum()) for part in parts]
        for own, size in zip(tensors, sizes, strict=True):
            assert size <= nbytes or len({*own}) == 1
        for (size, following), own in zip(itertools.pairwise(sizes), tensors[1:], strict=False):
            first = rows.nbytes[rows.tensor == own[0]].sum()
            assert size + first > nbytes, "the next tensor would have fitted"
            assert following > 0
