"""Cutting a box by others, against a look at every element."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from vllm_wt_sharded.boxes import cells

from .support.instances import SEEDS, box


def cut(start, size, boxes):
    starts = np.array([begin for begin, _ in boxes], dtype=np.int64).reshape(-1, len(start))
    sizes = np.array([end for _, end in boxes], dtype=np.int64).reshape(-1, len(start))
    return cells(np.array(start), np.array(size), starts, sizes)


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_every_element_is_in_one_cell_with_its_cover(seed):
    random = Random(seed)
    shape = [random.randint(1, 6) for _ in range(random.randint(1, 3))]
    boxes = [box(random, shape) for _ in range(random.randint(0, 5))]
    start, size = box(random, shape)
    found = cut(start, size, boxes)
    assert len(found.start) == len(found.size) == len(found.covers)
    assert found.start.tolist() == sorted(found.start.tolist())
    cover = {}
    for first, count, covers in zip(found.start, found.size, found.covers, strict=True):
        for index in np.ndindex(*count.tolist()):
            element = tuple((first + index).tolist())
            assert element not in cover
            cover[element] = covers
    elements = [tuple((np.array(start) + index).tolist()) for index in np.ndindex(*size)]
    assert set(cover) == set(elements)
    for element in elements:
        assert cover[element] == tuple(
            i
            for i, (begin, count) in enumerate(boxes)
            if all(b <= e < b + c for e, b, c in zip(element, begin, count, strict=True))
        )


@pytest.mark.parametrize(
    ("boxes", "count"),
    [
        ([([0, 0], [8, 8])], 1),
        ([([0, 0], [4, 8]), ([4, 0], [4, 8])], 2),
        ([([0, 0], [8, 2]), ([0, 2], [8, 6])], 2),
        ([([0, 0], [4, 4]), ([4, 0], [4, 4]), ([0, 4], [4, 4]), ([4, 4], [4, 4])], 4),
        # A window in the middle: above, left, itself, right, below.
        ([([0, 0], [8, 8]), ([3, 3], [2, 2])], 5),
        # What is left has the form of an L, and is two cells.
        ([([0, 0], [4, 4])], 3),
        ([], 1),
    ],
)
def test_no_finer_than_needed(boxes, count):
    found = cut([0, 0], [8, 8], boxes)
    assert len(found.covers) == count
    assert found.size.prod(axis=1).sum() == 64


def test_many_shards():
    shards = [([i * 3], [3]) for i in range(500)]
    Random(0).shuffle(shards)
    found = cut([1], [1498], shards)
    assert found.start[:3, 0].tolist() == [1, 3, 6]
    assert found.size[:, 0].tolist() == [2, *[3] * 498, 2]
    assert [shards[cover[0]][0][0] for cover in found.covers] == [3 * i for i in range(500)]
