"""A snapshot holds what its source had when it was taken, and nothing later."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.source import ModuleSource, StateDictSource
from vllm_wt.sources.snapshot import Snapshot

from .support.engines import assert_equal
from .test_pull_ring import Made


def _state():
    return {
        "a": torch.arange(12.0).view(3, 4),
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(7),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }


def _changed(state):
    return {name: tensor + 1 for name, tensor in state.items()}


@pytest.mark.parametrize("place", ["device", "host"])
def test_it_keeps_what_it_has_taken(place):
    state = _state()
    snapshot = Snapshot(StateDictSource(state), place)
    snapshot.take()
    first = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.add_(1)
    assert_equal(dict(snapshot), first)
    snapshot.take()
    assert_equal(dict(snapshot), state)
    assert dict(snapshot)["a"].data_ptr() == dict(snapshot.at_hand())["a"].data_ptr()
    assert snapshot.made == frozenset()
    assert snapshot.is_same()


def test_its_memory_stays_where_it_is():
    state = _state()
    snapshot = Snapshot(StateDictSource(state), "device")
    places = [tensor.data_ptr() for _, tensor in snapshot]
    for _ in range(3):
        state.update(_changed(state))  # in other memory
        snapshot.take()
        assert_equal(dict(snapshot), state)
    assert [tensor.data_ptr() for _, tensor in snapshot] == places
    assert all(tensor.is_contiguous() for _, tensor in snapshot)


def test_a_module_and_its_tied_weights():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    snapshot = Snapshot(ModuleSource(module), "host")
    snapshot.take()
    assert_equal(dict(snapshot), {n: p.detach() for n, p in module.named_parameters()})
    assert not any(tensor.requires_grad for _, tensor in snapshot)


def test_what_is_made_is_made_once():
    source = Made([(4,), (2, 3), (5,)])
    snapshot = Snapshot(source, "device")
    snapshot.take()
    assert source.walks == 1
    source.seed = 1
    assert_equal(dict(snapshot), {f"t{n}": _made(source, n, seed=0) for n in range(3)})
    snapshot.take()
    assert source.walks == 2
    assert_equal(dict(snapshot), {f"t{n}": _made(source, n, seed=1) for n in range(3)})


def _made(source, index, seed):
    source.seed, now = seed, source.seed
    value = source.value(index)
    source.seed = now
    return value


def test_a_walk_that_fails_here_goes_on_for_the_other_ranks():
    source = Made([(4,), (2, 3), (5,)])
    snapshot = Snapshot(source, "device")
    next(iter(snapshot))
    snapshot._views["t1"] = torch.zeros(7)  # what it cannot be copied to
    with pytest.raises(RuntimeError):
        snapshot.take()
    assert source.walks == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.pop("half"), "missing"),
        (lambda state: state.update(more=torch.ones(1)), "unexpected"),
        (lambda state: state.update(a=torch.ones(2)), "differs"),
        (lambda state: state["a"].untyped_storage().resize_(0), "freed or resized"),
    ],
)
def test_tensors_that_are_others_than_before(change, match):
    state = _state()
    snapshot = Snapshot(StateDictSource(state), "device")
    snapshot.take()
    change(state)
    with pytest.raises(ManifestMismatch, match=match):
        snapshot.take()


def test_a_source_that_leaves_out_what_it_has_announced():
    class Forgetful(Made):
        def __iter__(self):
            return (pair for pair in super().__iter__() if pair[0] != "t1")

    with pytest.raises(ManifestMismatch, match="not yielded all") as caught:
        Snapshot(Forgetful([(4,), (2,), (5,)]), "device").take()
    assert "'t1'" in caught.value.got


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(InvalidInfo):
        Snapshot(StateDictSource({"a": torch.ones(2, device="meta")}), "device")
