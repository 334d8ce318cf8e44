"""What a worker needs has all that its plan reads, and not much more."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from vllm_wt.loading.plan import Fallback
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.needs import needs_of

from .support.instances import SEEDS, box
from .support.loads import copy_of, load_plan, meta, moves, numbered


def copied(view, **names):
    return copy_of(view, torch.empty(view.shape), **names)


def boxes(plan, name="x"):
    """Of a tensor, as of numpy's slices: start and end in each dimension."""
    needs = needs_of(plan, 3)
    assert set(needs.rank.tolist()) <= {3}
    assert needs.tensors == plan.manifest.tensors
    index = [each.name for each in needs.tensors].index(name)
    dims = len(needs.tensors[index].shape)
    here = np.flatnonzero(needs.tensor == index)
    return sorted(
        [(a, a + n) for a, n in zip(needs.start[row, :dims], needs.size[row, :dims], strict=True)]
        for row in here
    )


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_all_that_is_read_and_nothing_twice(seed):
    random = Random(seed)
    shape = tuple(random.randint(1, 6) for _ in range(random.randint(0, 3)))
    full = numbered(shape)
    views = []
    for _ in range(random.randint(1, 4)):
        start, size = box(random, shape)
        view = full[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        if not view.numel():
            continue
        if random.random() < 0.4:
            view = view.permute(random.sample(range(view.dim()), view.dim()))
        if view.is_contiguous() and random.random() < 0.5:
            view = view.reshape(-1)
        views.append(view)
    needed = np.zeros(shape, dtype=int)
    for found in boxes(load_plan([meta(shape)], map(copied, views))):
        needed[tuple(slice(a, b) for a, b in found)] += 1
    assert (needed <= 1).all(), "boxes overlap"
    for view in views:
        assert (needed.reshape(-1)[view.reshape(-1).numpy()] == 1).all()
    if len(views) == 1 and views[0].dim() == len(shape):
        assert needed.sum() == views[0].numel(), "more than a single box"


CASES = {
    "all": (lambda x: x, [[(0, 8), (0, 12)]]),
    "columns": (lambda x: x[:, 5:9], [[(0, 8), (5, 9)]]),
    "transposed columns": (lambda x: x[2:5, 5:9].t(), [[(2, 5), (5, 9)]]),
    "rows as one run": (lambda x: x[2:5].reshape(-1), [[(2, 5), (0, 12)]]),
    "a run over an edge": (lambda x: x.view(-1)[10:15], [[(0, 2), (0, 12)]]),
    "a run within a row": (lambda x: x.view(-1)[13:15], [[(1, 2), (1, 3)]]),
    "every third column": (lambda x: x[:, 1::3], [[(0, 8), (1, 11)]]),
    "one element for many": (lambda x: x[3, 4:5].expand(7), [[(3, 4), (4, 5)]]),
}


@pytest.mark.parametrize(("view", "expected"), CASES.values(), ids=CASES)
def test_the_box_around_a_copy(view, expected):
    shape = (8, 12)
    assert boxes(load_plan([meta(shape)], [copied(view(numbered(shape)))])) == expected


def test_boxes_apart_and_boxes_that_overlap():
    x = numbered((8, 12))
    apart = [copied(x[:2]), copied(x[6:], into="q"), copied(x[:2], into="r")]
    assert boxes(load_plan([meta((8, 12))], apart)) == [[(0, 2), (0, 12)], [(6, 8), (0, 12)]]
    across = [copied(x[:3, :6]), copied(x[6:], into="q"), copied(x[2:, 5:], into="r")]
    assert boxes(load_plan([meta((8, 12))], across)) == [[(0, 8), (0, 12)]]


def test_a_fallback_needs_all_of_its_tensors():
    shapes = {"x": (4, 3), "y": (2,), "z": (5,)}
    metas = [meta(shape, name) for name, shape in shapes.items()]
    copies = [copied(numbered((4, 3))[:1]), copied(numbered((5,))[2:4], source="z")]
    plan = load_plan(metas, copies, [Fallback("m", ("why",), ("x",))])
    assert boxes(plan) == [[(0, 4), (0, 3)]]
    assert boxes(plan, "y") == []
    assert boxes(plan, "z") == [[(2, 4)]]


def test_scalars_and_what_is_empty():
    metas = [TensorMeta("x", "int64", ()), TensorMeta("e", "int64", (0, 3))]
    plan = load_plan(metas, [copied(numbered(())), copied(numbered((0, 3)), source="e")])
    assert boxes(plan) == [[]]
    assert boxes(plan, "e") == []
    whole = load_plan(metas, (), [Fallback("", ("why",), ("x", "e"))])
    assert boxes(whole) == [[]]
    assert boxes(whole, "e") == []


def test_a_tensor_that_is_alike_in_shape_only():
    """What is known of one tensor is not taken for another that is read otherwise."""
    metas = [meta((4, 3), name) for name in ("x", "y", "z")]
    plan = load_plan(
        metas,
        [
            copied(numbered((4, 3))[:2]),
            copied(numbered((4, 3))[2:], source="y"),
            copied(numbered((4, 3))[:2], source="z"),
        ],
    )
    assert boxes(plan) == boxes(plan, "z") == [[(0, 2), (0, 3)]]
    assert boxes(plan, "y") == [[(2, 4), (0, 3)]]


def test_a_copy_of_nothing_needs_nothing():
    view = numbered((4, 3))[:0]
    assert moves(copied(view)) == []
    assert boxes(load_plan([meta((4, 3))], [copied(view)])) == []
