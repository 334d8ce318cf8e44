"""Random layouts of trainers and workers, and a plan carried out on numpy arrays."""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout

# Where all caches are.
set_hypothesis_home_dir(Path(__file__).parents[4] / ".venv/cache/hypothesis")

SEEDS = st.integers(0, 2**32 - 1)


def chunk(size, parts, which):
    """Begin and length of one of torch's chunks."""
    each = -(-size // parts)
    begin = min(which * each, size)
    return begin, min(each, size - begin)


def divided(shape, mesh, placements, coordinate):
    """The box of a rank; ``placements`` has for each mesh dimension a tensor dimension, or None."""
    start, size = [0] * len(shape), list(shape)
    for parts, dim, which in zip(mesh, placements, coordinate, strict=True):
        if dim is not None:
            begin, size[dim] = chunk(size[dim], parts, which)
            start[dim] += begin
    return start, size


def box(random, shape):
    """Any box of a shape, in random places."""
    ends = [sorted(random.sample(range(size + 1), 2)) for size in shape]
    return [begin for begin, _ in ends], [end - begin for begin, end in ends]


def held(random, name, shape, ranks):
    """Rows of sources that cover a tensor: on a random mesh, or cut anywhere with random replicas."""
    if not shape:
        return [
            (name, rank, (), ()) for rank in random.sample(range(ranks), random.randint(1, ranks))
        ]
    rows = []
    if random.random() < 0.5:
        mesh = (random.randint(1, ranks), random.randint(1, 3))
        placements = [random.choice([None, *range(len(shape))]) for _ in mesh]
        for rank, coordinate in enumerate(np.ndindex(*mesh)):
            rows.append((name, rank, *divided(shape, mesh, placements, coordinate)))
    else:
        dim = random.randrange(len(shape))
        inner = random.sample(range(1, shape[dim]), random.randint(0, min(3, shape[dim] - 1)))
        cuts = [0, *sorted(inner), shape[dim]]
        for begin, end in pairwise(cuts):
            start, size = [0] * len(shape), list(shape)
            start[dim], size[dim] = begin, end - begin
            for rank in random.sample(range(ranks), random.randint(1, ranks)):
                rows.append((name, rank, start, size))
    for _ in range(random.randint(0, 3)):
        rows.append((name, random.randrange(ranks), *box(random, shape)))
    return [row for row in rows if 0 not in row[3]]


def instance(random, rows=1):
    """Sources that hold all of some tensors, and workers that need boxes of them.

    Args:
        random: A `random.Random`.
        rows: First dimensions are a multiple of it.
    """
    ranks, workers = random.randint(1, 6), random.randint(1, 4)
    metas, source, needs = [TensorMeta("empty", "int8", (0, 3))], [], []
    for number in range(random.randint(1, 5)):
        shape = [random.randint(1, 6) for _ in range(random.randint(0, 3))]
        shape = tuple(size * (rows if d == 0 else 1) for d, size in enumerate(shape))
        name = f"layers.{random.randint(0, 3)}.t{number}"
        metas.append(TensorMeta(name, random.choice(["bfloat16", "float32", "int8"]), shape))
        source += held(random, name, shape, ranks)
        needs += [
            (name, random.randrange(workers), *box(random, shape))
            for _ in range(random.randint(0, 5))
        ]
    random.shuffle(source)
    random.shuffle(needs)
    return Layout.of(metas, source), Layout.of(metas, needs)


def instances(rows=1):
    """A strategy of :func:`instance`; by seed, since hypothesis' own `Random` is rarely random."""
    return SEEDS.map(lambda seed: instance(Random(seed), rows))


def replay(plan, source, needs):
    """What every need has got, and how often each of its elements came; by need."""
    full = [
        np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1000 * number
        for number, shape in enumerate(source.shapes.tolist())
    ]

    def cut(array, start, size, origin):
        return array[
            tuple(slice(s - o, s - o + z) for s, z, o in zip(start, size, origin, strict=True))
        ]

    zeros = [0] * source.shapes.shape[1]
    pieces = [
        cut(full[tensor], start, size, zeros)
        for tensor, start, size in zip(source.tensor, source.start, source.size, strict=True)
    ]
    got = [np.zeros(size, dtype=np.int64) for size in needs.size.tolist()]
    times = [np.zeros(size, dtype=np.int64) for size in needs.size.tolist()]
    for worker in plan.workers:
        rows, own = plan.for_worker(worker), needs.rows_of(worker)
        for i in range(len(rows)):
            need, row = own[rows.need[i]], rows.source_row[i]
            start, size = rows.start[i], rows.size[i]
            piece = cut(pieces[row], start, size, source.start[row])
            assert piece.shape == tuple(size), "a row reaches out of its source"
            target = cut(got[need], start, size, needs.start[need])
            assert target.shape == tuple(size), "a row reaches out of its need"
            target[...] = piece
            cut(times[need], start, size, needs.start[need])[...] += 1
    wanted = [
        cut(full[tensor], start, size, zeros)
        for tensor, start, size in zip(needs.tensor, needs.start, needs.size, strict=True)
    ]
    return got, times, wanted
