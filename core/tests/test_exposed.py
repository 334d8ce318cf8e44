"""The trainer's tensors while they may be read: what counts as a change, and what does not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.exposed import Exposed
from vllm_wt.packing import as_bytes


class Unshown(list):
    """A failure that is shown would read memory that a test has freed."""

    def __repr__(self):
        return f"{len(self)} tensors"


@pytest.fixture
def tensors():
    ones = torch.ones(5, dtype=torch.bfloat16)
    return Unshown([torch.arange(24.0).view(4, 6), ones, torch.tensor(3.0)])


def kept(exposed):
    exposed.require_kept("push again")


def refused(exposed, message):
    with pytest.raises(ManifestMismatch, match=message) as error:
        exposed.require_kept("push again")
    assert error.value.cure.startswith("let push return")
    assert error.value.cure.endswith("push again")
    return error.value


def test_what_stays_as_it_is(tensors):
    exposed = Exposed(tensors)
    for _ in range(2):
        kept(exposed)
        assert exposed.in_place
    assert exposed.has_same_memory(Exposed(tensors))
    assert [m.data_ptr() for m in exposed.memory] == [t.data_ptr() for t in tensors]
    assert [m.numel() for m in exposed.memory] == [t.nbytes for t in tensors]
    assert all(m.dtype == torch.uint8 for m in exposed.memory)


def test_nothing_at_all():
    exposed = Exposed([])
    kept(exposed)
    assert exposed.in_place
    assert exposed.has_same_memory(Exposed([]))
    assert not exposed.has_same_memory(Exposed([torch.ones(1)]))


def test_reads_are_no_change(tensors):
    exposed = Exposed(tensors)
    for tensor in tensors:
        tensor.clone()
        tensor.sum().item()
        tensor.view(-1)
    kept(exposed)


WRITES = [
    lambda t: t.add_(1),
    lambda t: t.fill_(0),
    lambda t: t.copy_(torch.zeros(4, 6)),
    lambda t: t[1].mul_(2),
    lambda t: t.view(-1)[3:5].zero_(),
    lambda t: t.detach().add_(1),
    lambda t: t.t().zero_(),
    lambda t: t.__setitem__(0, 1.0),
    lambda t: torch.add(t, 1, out=t),
    lambda t: torch._foreach_add_([t], 1),
]
_IDS = ["add", "fill", "copy", "row", "view", "detached", "turned", "item", "out", "foreach"]


@pytest.mark.parametrize("write", WRITES, ids=_IDS)
def test_a_write_is_a_change(tensors, write):
    exposed = Exposed(tensors)
    write(tensors[0])
    error = refused(exposed, "written to while the workers")
    assert error.where == "a tensor of torch.float32 [4, 6]"
    assert "next training step" in error.cure
    assert exposed.in_place
    assert exposed.has_same_memory(Exposed(tensors))


def test_the_first_tensor_that_was_written_to_is_named(tensors):
    exposed = Exposed(tensors)
    tensors[1].zero_()
    tensors[2].zero_()
    assert refused(exposed, "written to").where == "a tensor of torch.bfloat16 [5]"


def test_a_step_of_an_optimizer_is_a_change():
    parameter = torch.nn.Parameter(torch.ones(4))
    exposed = Exposed([parameter.detach()])
    parameter.sum().backward()
    kept(exposed)
    torch.optim.SGD([parameter], lr=0.1).step()
    refused(exposed, "written to")


def test_what_has_been_looked_at_is_no_change(tensors):
    exposed = Exposed(tensors)
    for tensor in tensors:
        tensor.add_(1)
    exposed.look()
    kept(exposed)
    tensors[2].add_(1)
    refused(exposed, "written to")


@pytest.mark.parametrize("nbytes", [0, 8, 95])
def test_memory_that_was_freed_or_cut_is_a_change(tensors, nbytes):
    exposed = Exposed(tensors)
    again = Exposed(tensors)
    tensors[0].untyped_storage().resize_(nbytes)
    assert not exposed.in_place
    assert not exposed.has_same_memory(again)
    error = refused(exposed, "freed or resized while the workers")
    assert error.where == "a tensor of torch.float32 [4, 6]"
    assert "memory is freed or resized" in error.cure


def test_memory_that_comes_back_is_other_memory(tensors):
    exposed = Exposed(tensors)
    former = tensors[0].data_ptr()
    tensors[0].untyped_storage().resize_(0)
    held = torch.empty(24)  # what was freed may be given out again
    tensors[0].untyped_storage().resize_(1 << 20)
    if tensors[0].data_ptr() != former:
        assert not exposed.in_place
        refused(exposed, "freed or resized")
        assert not exposed.has_same_memory(Exposed(tensors))
    del held


def test_a_part_of_a_storage_needs_what_is_before_its_end_and_no_more(monkeypatch):
    """Even where the allocator has given the same address out again; here the test says that."""
    storage = torch.arange(100.0)
    exposed = Exposed([storage[10:20]])
    for elements, enough in ((20, True), (19, False), (0, False), (20, True)):
        storage.untyped_storage().resize_(4 * elements)
        monkeypatch.setattr(exposed, "_places", [t.data_ptr() for t in exposed.buffers])
        assert exposed.in_place == enough
        if enough:
            kept(exposed)
        else:
            refused(exposed, "freed or resized")
        assert exposed.has_same_memory(exposed) == enough


def test_a_resize_to_more_elements_moves_it():
    tensor = torch.ones(4)
    exposed = Exposed([tensor])
    place = tensor.data_ptr()
    tensor.resize_(1 << 18)
    if tensor.data_ptr() != place:
        assert not exposed.in_place
        refused(exposed, "freed or resized")
    else:
        refused(exposed, "written to|freed or resized")


def test_other_memory_by_data_is_a_change():
    tensor = torch.ones(4)
    exposed = Exposed([tensor])
    tensor.data = torch.zeros(4)
    assert not exposed.in_place
    assert not exposed.has_same_memory(Exposed([tensor]))
    refused(exposed, "freed or resized")
    tensor.data = exposed.memory[0].view(torch.float32)
    assert exposed.in_place


def test_other_memory_by_data_of_what_was_detached_from_is_for_the_source_to_see():
    """It is not the alias's, whose memory stays, and is held."""
    parameter = torch.nn.Parameter(torch.ones(4))
    exposed = Exposed([parameter.detach()])
    parameter.data = torch.zeros(4)
    assert exposed.in_place
    kept(exposed)
    assert not exposed.has_same_memory(Exposed([parameter.detach()]))
    assert exposed.memory[0].view(torch.float32).tolist() == [1] * 4


def test_other_memory_by_set_is_a_change():
    tensor = torch.ones(4)
    exposed = Exposed([tensor])
    tensor.set_(torch.zeros(4))
    assert not exposed.in_place
    refused(exposed, "freed or resized")


def test_the_memory_is_held_though_the_tensor_has_gone():
    tensor = torch.arange(4.0)
    exposed = Exposed([tensor])
    place = tensor.data_ptr()
    tensor.data = torch.zeros(4)
    others = [torch.zeros(4) for _ in range(64)]
    assert place not in {other.data_ptr() for other in others}
    assert exposed.memory[0].view(torch.float32).tolist() == [0, 1, 2, 3]


def test_tensors_are_let_go_with_it(tensors):
    refs = [weakref.ref(tensor) for tensor in tensors]
    exposed = Exposed(tensors)
    tensors.clear()
    assert all(ref() is not None for ref in refs)
    del exposed
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_other_tensors_over_the_same_memory_have_the_same(tensors):
    exposed = Exposed(tensors)
    again = Exposed([torch.nn.Parameter(t.detach()) for t in tensors])
    assert exposed.has_same_memory(again)
    assert again.has_same_memory(exposed)


@pytest.mark.parametrize(
    "others",
    [
        lambda ts: ts[:-1],
        lambda ts: [*ts, torch.ones(1)],
        lambda ts: [ts[1], ts[0], ts[2]],
        lambda ts: [ts[0].clone(), *ts[1:]],
        lambda ts: [ts[0][1:], *ts[1:]],
        lambda ts: [],
    ],
    ids=["fewer", "more", "order", "copy", "part", "none"],
)
def test_other_memory_is_not_the_same(tensors, others):
    exposed, other = Exposed(tensors), Exposed(others(tensors))
    assert not exposed.has_same_memory(other)
    assert not other.has_same_memory(exposed)


# -- tensors of inference --------------------------------------------------------------------------


@pytest.fixture
def inference():
    with torch.inference_mode():
        return torch.arange(6.0)


def test_writes_to_tensors_of_inference_are_not_counted(inference):
    exposed = Exposed([inference])
    with torch.inference_mode():
        inference.add_(1)
    kept(exposed)
    exposed.look()
    kept(exposed)


def test_their_memory_is_looked_at_all_the_same(inference):
    exposed = Exposed([inference])
    assert exposed.has_same_memory(Exposed([inference]))
    inference.untyped_storage().resize_(0)
    assert not exposed.in_place
    assert refused(exposed, "freed or resized").where == "a tensor of torch.float32 [6]"


def test_among_tensors_of_inference_others_are_counted(inference, tensors):
    exposed = Exposed([inference, tensors[1], tensors[0]])
    with torch.inference_mode():
        inference.add_(1)
    tensors[1].add_(1)
    assert refused(exposed, "written to").where == "a tensor of torch.bfloat16 [5]"


def test_they_may_be_exposed_and_looked_at_within_inference_mode(inference):
    with torch.inference_mode():
        exposed = Exposed([inference])
        kept(exposed)
        assert as_bytes(inference).data_ptr() == exposed.memory[0].data_ptr()
