"""A rank's pieces as a source of their own: what it says of memory that has moved."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import ManifestMismatch
from vllm_wt.source import StateDictSource
from vllm_wt_sharded.exposing import PiecesSource
from vllm_wt_sharded.sources import DeclaredShards
from vllm_wt_sharded.trainer import ShardedTrainer


@pytest.fixture
def declared():
    return {
        "a": ((0, 2), (2, 4), torch.ones(2, 2)),
        "b": ((0,), (3,), torch.zeros(3)),
    }


@pytest.fixture
def pieces(declared):
    return PiecesSource(DeclaredShards(declared, rank=1, ranks=2))


def move(declared, name):
    start, shape, tensor = declared[name]
    declared[name] = start, shape, tensor.clone()


def test_what_is_yielded(pieces, declared):
    expected = {"a (rank 1, 0)": declared["a"][2], "b (rank 1, 1)": declared["b"][2]}
    assert [meta.name for meta in pieces.manifest().tensors] == list(expected)
    for _ in range(2):
        got = dict(pieces.at_hand())
        assert list(got) == list(expected)
        assert all(got[n].data_ptr() == expected[n].data_ptr() for n in expected)
        assert pieces.is_same()
        pieces.end()


def test_memory_that_moved_is_not_the_same_until_it_was_asked_for(pieces, declared):
    """A look at it, for a round, is not enough: it is what is exposed that counts."""
    list(pieces.at_hand())
    assert pieces.is_same()
    move(declared, "a")
    assert not pieces.is_same()
    pieces.begin()
    assert not pieces.is_same()
    assert dict(pieces.at_hand())["a (rank 1, 0)"].data_ptr() == declared["a"][2].data_ptr()
    assert pieces.is_same()


@pytest.mark.parametrize("change", ["gone", "moved in its tensor", "more"])
def test_other_boxes_are_refused(pieces, declared, change):
    if change == "gone":
        del declared["b"]
    elif change == "moved in its tensor":
        declared["a"] = ((0, 1), (2, 4), declared["a"][2])
    else:
        pieces = PiecesSource(
            DeclaredShards(
                kept := {"a": declared["a"]}, rank=1, ranks=2, tensors=pieces_of(declared)
            )
        )
        kept["b"] = declared["b"]
    with pytest.raises(ManifestMismatch, match="does not hold what it did") as caught:
        pieces.begin()
    assert (caught.value.where, caught.value.backend) == ("rank 1", "sharded")


def pieces_of(declared):
    return DeclaredShards(declared, rank=1, ranks=2).tensors


def test_a_rank_that_holds_nothing():
    source = DeclaredShards(
        {"a": ((0,), (3,), torch.ones(0))},
        rank=0,
        ranks=2,
    )
    with pytest.raises(ManifestMismatch, match="holds nothing"):
        PiecesSource(source).manifest()


def test_a_trainer_of_one_rank_exposes_memory_that_moved():
    weights = {"a": torch.ones(3).share_memory_(), "b": torch.zeros(2).share_memory_()}
    trainer = ShardedTrainer(StateDictSource(weights), backend="sharded", over="ipc")
    trainer.describe(Deadline(30))

    def generation(version):
        trainer.publish(version, Deadline(30))
        trainer.settle()
        return trainer.generation

    first = generation(1)
    assert generation(2) == first
    weights["a"] = weights["a"].clone().share_memory_()
    assert generation(3) == first + 1
    assert generation(4) == first + 1
    trainer.shutdown()
