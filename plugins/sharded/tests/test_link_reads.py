"""The reads that are told ahead are those that a worker makes of what trainers announce."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.loading.plan import Fallback
from vllm_wt.manifest import Manifest
from vllm_wt.source import StateDictSource
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.link_reads import reads_of
from vllm_wt_sharded.needs import needs_of
from vllm_wt_sharded.planner import plan
from vllm_wt_sharded.reception import reception
from vllm_wt_sharded.trainer import ShardedTrainer

from .support.instances import SEEDS
from .support.loads import copy_of, cut, load_plan, meta, numbered

RANKS = 3
MANY = 1 << 20


@pytest.fixture(scope="module")
def info():
    """What a trainer says; that of one rank, of which the tests make several."""
    trainer = ShardedTrainer(
        StateDictSource({"a": torch.zeros(1)}), backend="sharded", over="ipc", verify="digest"
    )
    yield trainer.describe(Deadline(30))
    trainer.shutdown()


def announced(info, layout):
    """What a trainer with this layout would say."""
    return replace(
        info,
        layout=layout.to_wire(),
        layout_digest=layout.digest,
        manifest_digest=Manifest(layout.tensors).digest,
        owners=info.owners * layout.ranks,
    )


def instance(random):
    """A load plan with boxes and whole tensors, and who holds what, in pieces of several blocks."""
    metas, copies, rows, fallbacks = [], [], [], []
    for number in range(random.randint(1, 3)):
        name = f"layers.{number}.x"
        shape = tuple(random.randint(1, 60) for _ in range(random.randint(1, 3)))
        metas.append(meta(shape, name))
        rows += cut(random, shape, ranks=RANKS, name=name)
        if random.random() < 0.8:  # of two that overlap, all of the box around them is taken
            box = [sorted(random.sample(range(size + 1), 2)) for size in shape]
            view = numbered(shape)[tuple(slice(*ends) for ends in box)]
            copies.append(copy_of(view, torch.empty(view.shape), source=name))
        if random.random() < 0.2:
            fallbacks.append(Fallback(f"m{number}", ("for a test",), (name,)))
    metas.append(meta((RANKS,), "on each rank"))
    rows += [("on each rank", rank, (rank,), (1,)) for rank in range(RANKS)]
    return load_plan(metas, copies, fallbacks), Layout.of(metas, rows)


@given(SEEDS)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("gap", [0, 100, 1 << 14])
def test_as_a_worker_reads(info, gap, seed):
    load, layout = instance(Random(seed))
    needs = needs_of(load, 0)
    if not len(needs):
        return
    found = reception(load, announced(info, layout), worker=0, gap=gap, alignment=BLOCK, most=MANY)
    reads, nbytes = Counter(), Counter()
    for part in found.parts:
        for runs in part.slices.runs.values():
            reads[part.rank] += len(runs)
            nbytes[part.rank] += sum(length for _, length in runs)
    full = {name for fallback in load.fallbacks.values() for name in fallback.sources}
    rows = plan(layout, needs).for_worker(0)
    told = reads_of(layout, rows, full=full, gap=gap)
    assert [each.tolist() for each in told] == [
        [counts[rank] for rank in range(RANKS)] for counts in (reads, nbytes)
    ]


@pytest.mark.parametrize(
    ("width", "gap", "expected"),
    [
        (4096, 16384, (1, 4 * 3 * 4096 - 2 * 4096)),  # all that lies between
        (4096, 100, (4, 4 * 4096)),
        (8, 0, (1, 4 * 3 * 8)),  # all in one block, which the tensor ends in
    ],
)
def test_a_third_of_each_row(width, gap, expected):
    """Of four rows the first third, of so many bytes."""
    columns = 3 * width // 8
    shape = (4, columns)
    view = numbered(shape)[:, : columns // 3]
    load = load_plan([meta(shape)], [copy_of(view, torch.empty(view.shape))])
    layout = Layout.of(load.manifest.tensors, [("x", 0, (0, 0), shape)])
    rows = plan(layout, needs_of(load, 0)).for_worker(0)
    reads, nbytes = reads_of(layout, rows, full=(), gap=gap)
    assert (reads.tolist(), nbytes.tolist()) == ([expected[0]], [expected[1]])
