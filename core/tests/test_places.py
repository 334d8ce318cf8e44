"""Where tensors are, by both ways to look."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.packing import places


class Subclass(torch.Tensor):
    """One that takes part in each question."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"asked for {func}")


@pytest.fixture(params=[False, True], ids=["by addresses", "by torch's comparison"])
def tensors(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(places, "_compared", None)
    elif places._compared is None:
        pytest.skip("this torch has none")
    made = [torch.zeros(4), torch.nn.Parameter(torch.ones(3, 2)), torch.zeros(8)[2:]]
    return [*made, torch.zeros(2).as_subclass(Subclass), torch.zeros(0)]


def test_they_stay(tensors):
    assert places.are_at(tensors, places.places_of(tensors))
    assert places.are_at([], [])


def test_each_that_moves_is_seen(tensors):
    for index in range(4):
        was = places.places_of(tensors)
        tensors[index] = torch.zeros(100)
        assert not places.are_at(tensors, was)


def test_memory_that_is_freed(tensors):
    was = places.places_of(tensors)
    tensors[0].untyped_storage().resize_(0)
    assert not places.are_at(tensors, was)


def test_data_that_is_replaced(tensors):
    was = places.places_of(tensors)
    tensors[1].data = torch.ones(3, 2)
    assert not places.are_at(tensors, was)
