"""Copies of a load plan, by torch's own views; and a worker's plan carried out on arrays."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import torch

from vllm_wt.loading.plan import Copy, LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.needs import needs_of
from vllm_wt_sharded.planner import plan as planned
from vllm_wt_sharded.sourcing import Taken, sourced

WORKER = 5


def copy_of(view, dest, *, source="x", into="p"):
    """Of a view of a contiguous tensor into a view of a parameter."""
    return Copy(
        source,
        view.storage_offset(),
        tuple(view.stride()),
        (),
        "m",
        into,
        dest.storage_offset(),
        tuple(dest.stride()),
        "int64",
        tuple(view.shape),
    )


def numbered(shape):
    """A tensor of which each element says where it is."""
    return torch.arange(int(np.prod(shape))).reshape(shape)


def meta(shape, name="x"):
    return TensorMeta(name, "int64", tuple(shape))


def load_plan(metas, copies=(), fallbacks=()):
    """A plan of these tensors; fallbacks by their modules."""
    return LoadPlan(
        Manifest(tuple(metas)), tuple(copies), (), {}, {each.module: each for each in fallbacks}, ()
    )


def moves(copy):
    """Which element goes where, one by one, in order of the copy's indices."""
    steps = [range(count) for count in copy.shape]
    return [
        (
            copy.source_offset + sum(map(int.__mul__, index, copy.source_strides)),
            copy.dest_offset + sum(map(int.__mul__, index, copy.dest_strides)),
        )
        for index in itertools.product(*steps)
    ]


def cut(random, shape, ranks=3, replicas=2, name="x"):
    """Rows of ranks that hold a tensor in boxes of a random grid, some of them more than once."""
    grid = []
    for size in shape:
        inner = random.sample(range(1, size), random.randint(0, min(3, size - 1))) if size else []
        grid.append(list(pairwise([0, *sorted(inner), size])))
    rows = []
    for box in itertools.product(*grid):
        for holder in random.sample(range(ranks), random.randint(1, replicas)):
            rows.append((name, holder, [a for a, _ in box], [b - a for a, b in box]))
    random.shuffle(rows)
    return rows


class Load:
    """What a worker does by a plan of full tensors, from the pieces of a layout.

    Args:
        plan: Of the full tensors.
        rows: Who holds what.
        taken: What is taken of each tensor; by default what the planner says.
    """

    def __init__(self, plan, rows, taken=None):
        self.plan = plan
        self.layout = Layout.of(plan.manifest.tensors, rows)
        self.metas = [meta(self._size(row), f"p{row}") for row in range(len(self.layout))]
        if taken is None:
            needs = needs_of(plan, WORKER)
            self.rows = planned(self.layout, needs).for_worker(WORKER) if len(needs) else None
            taken = self._taken(self.rows)
        self.taken = taken
        self.found = sourced(plan, taken, self.metas)

    def run(self, *parameters, known=-1):
        """The parameters ``p``, ``q`` and so on of these sizes, written from what ranks hold."""
        written = {
            name: np.full(size, known) for name, size in zip("pqr", parameters, strict=False)
        }
        full = {each.name: numbered(each.shape).numpy() for each in self.plan.manifest.tensors}
        values = dict(self.fulls())
        for row, piece in enumerate(self.metas):
            tensor = self.layout.tensors[self.layout.tensor[row]]
            at = zip(self._start(row), self._size(row), strict=True)
            box = full[tensor.name][tuple(slice(a, a + n) for a, n in at)]
            values[piece.name] = box
        for copy in self.found.plan.copies:
            source = np.ascontiguousarray(values[copy.source]).reshape(-1)
            for read, write in moves(copy):
                written[copy.parameter][write] = source[read]
        return [written[name] for name, _ in zip("pqr", parameters, strict=False)]

    def fulls(self):
        """Each tensor that is put together, as it comes out; -1 where nothing came."""
        for name, boxes in self.found.together.items():
            shape = self.plan.source(name).shape
            out = np.full(shape, -1)
            for box in boxes:
                row = int(box.piece[1:])
                at = zip(self._start(row), self._size(row), strict=True)
                piece = numbered(shape).numpy()[tuple(slice(a, a + n) for a, n in at)]
                out[box.at] = piece.reshape(box.extent)[box.within]
            yield name, out

    def _taken(self, rows):
        found = {}
        if rows is None:
            return found
        for row, start, size in zip(
            rows.source_row.tolist(), rows.start.tolist(), rows.size.tolist(), strict=True
        ):
            tensor = self.layout.tensors[self.layout.tensor[row]]
            dims = len(tensor.shape)
            box = Taken(
                f"p{row}",
                self._start(row),
                self._size(row),
                tuple(start[:dims]),
                tuple(size[:dims]),
                tensor.shape,
            )
            found.setdefault(tensor.name, []).append(box)
        return found

    def _start(self, row):
        return self._box(self.layout.start, row)

    def _size(self, row):
        return self._box(self.layout.size, row)

    def _box(self, column, row):
        dims = len(self.layout.tensors[self.layout.tensor[row]].shape)
        return tuple(column[row, :dims].tolist())
