"""What a plan says of the checkpoint: bytes to read, coverage, casts."""

import functools
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.errors import ManifestMismatch
from vllm_wt.loading import regions
from vllm_wt.loading.plan import Cast, Needed
from vllm_wt.loading.recorder import record, simplified
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES, meta_of

# Where all caches are.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".venv/cache/hypothesis")


class Model(torch.nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.add_module(name, leaf := torch.nn.Module())
            weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            leaf.weight = torch.nn.Parameter(weight, requires_grad=False)


def plan_of(write, *source, dtype=torch.bfloat16, **shapes):
    """The plan of one tensor ``w`` that ``write`` takes to the weights of modules."""
    model = Model(**shapes)

    def load(weights):
        for _, weight in weights:
            write(weight, *(getattr(model, name).weight.data for name in shapes))

    manifest = Manifest((meta_of("w", torch.empty(source, dtype=dtype, device="meta")),))
    return record(model, load, manifest)


def test_rows_are_one_run():
    plan = plan_of(lambda w, a: a.copy_(w[2:5]), 8, 16, a=(3, 16))
    assert plan.needed("w") == Needed(((64, 96),), 96)
    assert plan.needed("w").waste == 0
    assert plan.nbytes == 96


def test_columns_are_one_run_if_the_gaps_are_small():
    plan = plan_of(lambda w, a: a.copy_(w[:, 4:8]), 3, 16, a=(3, 4))
    assert plan.needed("w", gap=23) == Needed(((8, 8), (40, 8), (72, 8)), 24)
    assert plan.needed("w", gap=24) == Needed(((8, 72),), 24)
    assert plan.needed("w").waste == 48
    assert plan.nbytes == 24


def test_bytes_are_counted_once():
    def write(w, a, b):
        a.copy_(w[:4])
        a[:2].copy_(w[:2])
        b.copy_(w[3:5].t())

    plan = plan_of(write, 8, 16, a=(4, 16), b=(16, 2))
    assert plan.needed("w") == Needed(((0, 160),), 160)
    assert plan.parameters["a.weight"].copied == 64
    assert plan.sources("b") == ("w",)


def test_a_broadcast_reads_its_element_once():
    plan = plan_of(lambda w, a: a.copy_(w[1]), 4, 1, a=(5, 6), dtype=torch.float32)
    assert plan.needed("w") == Needed(((4, 4),), 4)


def test_what_falls_back_is_needed_whole():
    def write(w, a, b):
        a.copy_(w[:2])
        b.copy_(w[:1] + 1)

    plan = plan_of(write, 8, 4, a=(2, 4), b=(1, 4))
    assert plan.direct == ("a",)
    assert plan.needed("w") == Needed(((0, 64),), 64)
    assert plan.sources("b") == ("w",)


def test_unused_tensors_need_nothing():
    plan = plan_of(lambda w, a: None, 8, 4, a=(2, 4))
    assert plan.unused == ("w",)
    assert plan.needed("w") == Needed((), 0)
    assert plan.nbytes == 0
    assert not plan.direct
    with pytest.raises(ManifestMismatch, match="'x'"):
        plan.needed("x")


def test_an_enormous_region_is_one_run():
    """A list of its runs would be larger than the model."""
    plan = plan_of(lambda w, a: a.copy_(w[:, 0]), 2**24, 2, a=(2**24,))
    needed = plan.needed("w")
    assert needed.runs == ((0, 4 * 2**24 - 2),)


def test_neighbours_are_joined():
    def write(w, a):
        for n in range(6):
            a[n, :3].copy_(w[n, 1].t())

    plan = plan_of(write, 6, 2, 5, 3, a=(6, 4, 5))
    (copy,) = plan.copies
    assert sorted(copy.shape) == [3, 5, 6]
    assert plan.parameters["a.weight"].copied == 90


def test_neighbours_that_go_back_are_not_joined():
    plan = plan_of(lambda w, a: [a[n].copy_(w[n]) for n in (2, 1, 0)], 3, 4, a=(3, 4))
    assert len(plan.copies) == 3
    plan = plan_of(lambda w, a: [a[n % 2].copy_(w[n]) for n in range(4)], 4, 4, a=(2, 4))
    assert [(copy.source_offset, copy.dest_offset) for copy in plan.copies] == [(0, 0), (8, 0)]
    plan = plan_of(lambda w, a: [a[n : n + 2].copy_(w[n]) for n in range(3)], 3, 4, a=(4, 4))
    assert len(plan.copies) == 3


@pytest.mark.parametrize(
    ("source", "casts", "dest", "left"),
    [
        ("bfloat16", ["float32"], "bfloat16", []),
        ("bfloat16", ["float32"], "float16", []),
        ("float32", ["bfloat16"], "float32", ["bfloat16"]),
        ("float32", ["bfloat16"], "bfloat16", []),
        ("float32", ["bfloat16", "float32", "float16"], "float16", ["bfloat16"]),
        ("float16", ["float32", "float64", "bfloat16"], "bfloat16", []),
        ("uint8", ["float32"], "int8", ["float32"]),
        ("int32", ["float32"], "bfloat16", ["float32"]),
        ("float16", ["bfloat16"], "float32", ["bfloat16"]),
        ("float8_e4m3fn", ["bfloat16", "float32"], "float8_e4m3fn", []),
    ],
)
def test_casts_are_left_out_only_if_they_change_nothing(source, casts, dest, left):
    result = simplified(source, tuple(Cast(name) for name in casts), dest)
    assert [cast.dtype for cast in result] == left
    size = 1 if DTYPES[source].itemsize == 1 else 2
    bits = torch.arange(256**size, dtype=torch.int32).to(torch.uint8 if size == 1 else torch.int16)
    if DTYPES[source].itemsize == 4:
        bits = bits.int() << 15
    values = bits.view(DTYPES[source])
    values = values[values.float().isfinite()]

    def through(names):
        value = values
        for name in [*names, dest]:
            value = value.to(DTYPES[name])
        return value.float()

    if DTYPES[dest].is_floating_point:
        assert torch.equal(through(casts).nan_to_num(), through(left).nan_to_num())


def test_bits_are_never_left_out():
    casts = (Cast("int16", bits=True), Cast("bfloat16", bits=True), Cast("float32"))
    assert simplified("float16", casts, "bfloat16") == casts[:2]


# -- arithmetic of regions


def elements(offset, dims):
    found = [offset]
    for size, stride in dims:
        found = [at + n * stride for at in found for n in range(size)]
    return found


_strides = st.sampled_from([0, 1, 1, 1, 2, 3, 5, 12])
_dims = st.lists(st.tuples(st.integers(1, 5), _strides), max_size=3)
_regions = st.lists(st.tuples(st.integers(0, 40), _dims), min_size=1, max_size=4)


@settings(deadline=None, database=None)
@given(_regions, st.integers(0, 4), st.booleans())
def test_runs_hold_exactly_the_elements(given_regions, gap, few):
    limit, regions._FEW = regions._FEW, regions._FEW if few else 0  # with tensors, too
    try:
        merged = regions.union([regions.runs(*region) for region in given_regions], gap)
        count = regions.covered(given_regions)
    finally:
        regions._FEW = limit
    exact = {at for region in given_regions for at in elements(*region)}
    covered = {at for start, end in merged for at in range(start, end)}
    assert count == len(exact)
    assert exact <= covered
    assert all(b[0] - a[1] > gap for a, b in pairwise(merged))
    if gap == 0:
        assert covered == exact


def test_runs_are_as_long_as_they_can_be():
    assert regions.runs(7, [(3, 4), (4, 1), (2, 0)]) == ([7], 12)
    assert regions.runs(0, [(3, 2), (4, 1)]) == ([0], 8)
    assert regions.union([([0], 5), ([1], 2)]) == [(0, 5)]


@settings(database=None)
@given(_regions, st.tuples(st.integers(0, 40), _dims))
def test_overlap(some, other):
    exact = {at for region in some for at in elements(*region)}
    assert regions.overlap(some, other) == bool(exact & set(elements(*other)))


@settings(database=None)
@given(st.lists(st.integers(0, 20), max_size=30))
def test_progressions_give_the_index_back(index):
    found = list(regions.progressions(index))
    assert [first + n * step for first, step, count in found for n in range(count)] == index
    assert all(step >= 0 for _, step, _ in found)


@settings(database=None)
@given(st.lists(st.tuples(*[st.integers(1, 5)] + [st.integers(0, 30)] * 2), max_size=4))
def test_coalesced_loops_copy_the_same_elements(loops):
    def pairs(loops):
        reads = elements(0, [(n, read) for n, read, _ in loops])
        writes = elements(0, [(n, write) for n, _, write in loops])
        return sorted(zip(reads, writes, strict=True))

    assert pairs(regions.coalesced(loops)) == pairs(loops)


def test_a_copy_in_too_many_pieces_falls_back():
    index = list(range(10000))
    random.Random(3).shuffle(index)
    plan = plan_of(lambda w, a: a.copy_(w[torch.tensor(index)]), 10000, a=(10000,))
    assert plan.fallbacks["a"].reasons == ("a copy in more than 4096 pieces",)
    plan = plan_of(
        lambda w, a: a.copy_(w.t().reshape(-1).as_strided((9000,), (7,))), 300, 300, a=(9000,)
    )
    assert functools.reduce(lambda total, copy: total + copy.numel, plan.copies, 0) in {0, 9000}
