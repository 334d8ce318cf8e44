"""A load plan that reads from pieces does what the plan of the full tensors does."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from vllm_wt.errors import LoadError
from vllm_wt.loading.plan import Fallback

from .support.instances import SEEDS, box
from .support.loads import Load, copy_of, cut, load_plan, meta, numbered

COLUMNS = [("x", rank, (0, 3 * rank), (8, 3)) for rank in range(4)]
ROWS = [("x", rank, (2 * rank, 0), (2, 12)) for rank in range(4)]


def contiguous(view, **names):
    return copy_of(view, torch.empty(view.shape), **names)


def loaded(view, rows, shape=(8, 12)):
    """A load of one view into a parameter of its size, checked."""
    load = Load(load_plan([meta(shape)], [contiguous(view)]), rows)
    [got] = load.run(view.numel())
    assert got.tolist() == view.reshape(-1).tolist()
    return load.found.plan.copies


def some_views(random, shape):
    full = numbered(shape)
    for _ in range(random.randint(1, 3)):
        start, size = box(random, shape)
        view = full[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        if view.dim() > 1 and random.random() < 0.4:
            view = view.permute(*random.sample(range(view.dim()), view.dim()))
        if view.is_contiguous() and random.random() < 0.5:
            view = view.reshape(-1)
        if random.random() < 0.2:
            view = view.expand(2, *view.shape)
        yield view


@given(SEEDS)
@settings(max_examples=400, deadline=None)
def test_what_is_written_is_the_same(seed):
    random = Random(seed)
    shape = tuple(random.randint(1, 7) for _ in range(random.randint(0, 3)))
    views = list(some_views(random, shape))
    dests = [torch.empty(view.shape) for view in views]
    for number, dest in enumerate(dests):
        if dest.dim() > 1 and random.random() < 0.3:
            order = random.sample(range(dest.dim()), dest.dim())
            sizes = [dest.shape[i] for i in order]
            back = sorted(range(dest.dim()), key=order.__getitem__)
            dests[number] = torch.empty(sizes).permute(*back)
    pairs = zip(views, dests, "pqr", strict=False)
    copies = [copy_of(view, dest, into=name) for view, dest, name in pairs]
    load = Load(load_plan([meta(shape)], copies), cut(random, shape))
    written = load.run(*[view.numel() for view in views])
    for got, view, dest in zip(written, views, dests, strict=True):
        expected = torch.full((view.numel(),), -1).as_strided(dest.shape, dest.stride())
        expected.copy_(view)
        assert got.tolist() == expected.as_strided((view.numel(),), (1,)).tolist()


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_full_tensors_are_put_together(seed):
    random = Random(seed)
    shape = tuple(random.randint(1, 7) for _ in range(random.randint(0, 3)))
    plan = load_plan([meta(shape)], (), [Fallback("m", ("why",), ("x",))])
    load = Load(plan, cut(random, shape))
    [(name, full)] = load.fulls()
    assert name == "x"
    assert np.array_equal(full, numbered(shape).numpy())
    assert load.found.plan.copies == ()
    read = {each.piece for each in load.found.together["x"]}
    assert {n for f in load.found.plan.fallbacks.values() for n in f.sources} == read


# -- few copies --------------------------------------------------------------------------------------

FEW = {
    "whole": (lambda x: x, 4, 4),
    "transposed": (lambda x: x.t(), 4, 4),
    "columns 4 to 8": (lambda x: x[:, 4:8], 2, 4),
    "rows 3 to 5": (lambda x: x[3:5], 4, 2),
    "every other row": (lambda x: x[::2], 4, 4),
}


@pytest.mark.parametrize(("view", "columns", "rows"), FEW.values(), ids=FEW)
def test_one_copy_for_each_piece(view, columns, rows):
    x = numbered((8, 12))
    for held, count in ((COLUMNS, columns), (ROWS, rows)):
        copies = loaded(view(x), held)
        assert len(copies) == count == len({copy.source for copy in copies})


def test_partial_rows_over_several_pieces():
    """A run that begins and ends within rows, and goes on from piece to piece in each of them."""
    copies = loaded(numbered((8, 12)).view(-1)[7:65], COLUMNS)
    assert {copy.source for copy in copies} == {"p0", "p1", "p2", "p3"}
    assert len(copies) <= 12


def test_many_alike_rows_are_few_copies():
    rows = [("x", rank, (0, 1000 * rank), (500, 1000)) for rank in range(2)]
    copies = loaded(numbered((500, 2000))[:, 990:1010], rows, (500, 2000))
    assert [copy.shape for copy in copies] == [(500, 10), (500, 10)]


# -- forms -------------------------------------------------------------------------------------------


def test_an_element_that_is_repeated():
    loaded(numbered((8, 12))[:, 5:6].expand(8, 4), COLUMNS)


def test_a_scalar():
    assert len(loaded(numbered(()), [("x", 1, (), ())], ())) == 1


def test_a_parameter_that_two_tensors_make():
    metas = [meta((4, 3)), meta((2, 3), "y")]
    dest = torch.empty(6, 3)
    copies = [
        copy_of(numbered((4, 3)), dest[:4]),
        copy_of(numbered((2, 3)), dest[4:], source="y"),
    ]
    rows = [
        *[("x", rank, (2 * rank, 0), (2, 3)) for rank in range(2)],
        *[("y", rank, (0, rank), (2, rank + 1)) for rank in range(2)],
    ]
    [got] = Load(load_plan(metas, copies), rows).run(18)
    assert got.tolist() == [*range(12), *range(6)]


def test_the_later_copy_counts():
    """Of two that write one element, whichever pieces they are taken from."""
    metas = [meta((4,)), meta((4,), "y")]
    dest = torch.empty(4)
    plan = load_plan(
        metas,
        [
            copy_of(numbered((4,)), dest),
            copy_of(numbered((4,))[2:], dest[1:3], source="y"),
            copy_of(numbered((4,))[:1], dest[2:3]),
        ],
    )
    rows = [("x", 0, (0,), (3,)), ("x", 1, (3,), (1,)), ("y", 1, (0,), (4,))]
    assert Load(plan, rows).run(4)[0].tolist() == [0, 2, 0, 3]


def test_what_a_tensor_is_alike_in_is_taken_over_and_nothing_else():
    """Two tensors of one shape, cut alike, and one that is cut otherwise."""
    names = ("x", "y", "z")
    metas = [meta((4, 4), name) for name in names]
    copies = [
        replace(contiguous(numbered((4, 4)).t(), source=name), parameter=into)
        for name, into in zip(names, "pqr", strict=True)
    ]
    rows = [(name, rank, (0, 2 * rank), (4, 2)) for name in "xy" for rank in range(2)]
    rows += [("z", rank, (2 * rank, 0), (2, 4)) for rank in range(2)]
    load = Load(load_plan(metas, copies), rows)
    assert [got.tolist() for got in load.run(16, 16, 16)] == [
        numbered((4, 4)).t().reshape(-1).tolist()
    ] * 3
    assert {copy.parameter: copy.source for copy in load.found.plan.copies[::2]} == {
        "p": "p0",
        "q": "p2",
        "r": "p4",
    }


# -- fallbacks and what is empty ---------------------------------------------------------------------


def test_what_a_fallback_needs_goes_to_other_modules_too():
    """From the tensor that is put together, in the order in which it was copied."""
    metas = [meta((8, 12)), meta((4,), "y")]
    dest = torch.empty(24)
    copies = [
        copy_of(numbered((4,)), dest[:4], source="y"),
        copy_of(numbered((8, 12))[1:3, :], dest.view(2, 12)),
        copy_of(numbered((4,)), dest[4:8], source="y"),
    ]
    plan = load_plan(metas, copies, [Fallback("other", ("why",), ("x",))])
    load = Load(plan, [*COLUMNS, ("y", 0, (0,), (4,))])
    [got] = load.run(24)
    expected = numbered((8, 12))[1:3].reshape(-1).tolist()
    assert got.tolist() == [*expected[:4], 0, 1, 2, 3, *expected[8:]]
    assert list(load.found.together) == ["x"]


def test_what_is_empty_is_handed_over():
    metas = [meta((0, 3)), meta((2,), "y")]
    empty = contiguous(numbered((0, 3)))
    plan = load_plan(metas, [empty, contiguous(numbered((2,)), source="y", into="q")])
    load = Load(plan, [("y", 0, (0,), (2,))])
    assert load.found.together == {"x": ()}
    assert load.found.plan.copies[0] == empty
    assert load.found.plan.fallbacks == {}
    assert load.run(0, 2)[1].tolist() == [0, 1]


def test_replicas_that_the_planner_cuts():
    """What two ranks hold is taken from both, and comes right."""
    shape = (64, 512)
    view = numbered(shape)
    rows = [("x", rank, (0, 0), shape) for rank in range(2)]
    copies = loaded(view[:, 3:509], rows, shape)
    assert {copy.source for copy in copies} == {"p0", "p1"}
    for name in ("p0", "p1"):
        part = sum(copy.numel for copy in copies if copy.source == name)
        assert part > view[:, 3:509].numel() // 3


# -- what must not be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", range(4))
@pytest.mark.parametrize("rows", [COLUMNS, ROWS], ids=["columns", "rows"])
def test_what_is_not_covered_is_refused(rows, gone):
    plan = load_plan([meta((8, 12))], [contiguous(numbered((8, 12)))])
    taken = Load(plan, rows).taken["x"]
    with pytest.raises(LoadError, match="'x' that the model needs was not planned for") as caught:
        Load(plan, rows, {"x": taken[:gone] + taken[gone + 1 :]})
    assert "'m.p'" in caught.value.got


@pytest.mark.parametrize("taken", [{}, {"x": ()}])
def test_nothing_for_a_tensor_that_is_needed(taken):
    plan = load_plan([meta((8, 12))], [contiguous(numbered((8, 12))[2:3, 2:3])])
    with pytest.raises(LoadError, match="was not planned for"):
        Load(plan, COLUMNS, taken)


def test_a_box_that_is_short_in_the_middle_of_a_row():
    plan = load_plan([meta((8, 12))], [contiguous(numbered((8, 12)))])
    first, *others = Load(plan, COLUMNS).taken["x"]
    for short in (
        replace(first, size=(8, 2)),
        replace(first, start=(0, 1), size=(8, 2)),
        replace(first, size=(7, 3)),
    ):
        with pytest.raises(LoadError, match="was not planned for"):
            Load(plan, COLUMNS, {"x": [short, *others]})
