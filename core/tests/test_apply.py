"""Direct writes: where they go, and what they refuse before anything is written."""

import pytest
import torch

from vllm_wt.errors import LoadError
from vllm_wt.loading.apply import DirectWrites
from vllm_wt.loading.recorder import record
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of


def plan_of(write, source, **parameters):
    """The plan of one tensor ``w`` that ``write`` takes to parameters of a module."""
    model = torch.nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    manifest = Manifest((meta_of("w", source),))

    def load(weights):
        for _, weight in weights:
            write(weight, **{name: getattr(model, name).data for name in parameters})

    return record(model, load, manifest)


def test_a_parameter_in_another_form_is_refused_and_nothing_is_written():
    source = torch.ones(2, 3)
    plan = plan_of(
        lambda w, a, b: (a.copy_(w), b.copy_(w)), source, a=source.clone(), b=source.clone()
    )
    fits = torch.zeros(2, 3)
    for wrong in (fits.double(), fits[:1], torch.zeros(3, 2).t()):
        with pytest.raises(LoadError, match="'b' is not as it was recorded"):
            DirectWrites(plan, {"a": fits, "b": wrong})
    assert not fits.any()


def test_a_parameter_is_written_where_it_lies_now():
    source = torch.arange(9.0).view(3, 3)[1:2]
    plan = plan_of(lambda w, a: a[1:].copy_(w), source, a=torch.zeros(2, 3))
    memory = torch.zeros(20)
    DirectWrites(plan, {"a": memory[5:11].view(2, 3)}).run({"w": source})
    assert memory.tolist() == [0] * 8 + [3, 4, 5] + [0] * 9


def test_only_what_is_given_is_written():
    source = torch.ones(3)
    plan = plan_of(
        lambda w, a, b: (a.copy_(w), b.copy_(w)), source, a=source.clone(), b=source.clone()
    )
    a = torch.zeros(3)
    DirectWrites(plan, {"a": a}).run({"w": source})
    assert a.tolist() == [1, 1, 1]


def test_a_source_need_not_be_contiguous():
    source = torch.arange(6.0).view(2, 3)
    plan = plan_of(lambda w, a: a.copy_(w[:, 1]), source, a=torch.zeros(2))
    a = torch.zeros(2)
    DirectWrites(plan, {"a": a}).run({"w": source.t().contiguous().t()})
    assert a.tolist() == [1, 4]


def test_fills_come_before_all_copies():
    """The padding of one parameter may be another's memory."""
    memory = torch.zeros(4)

    def write(w, a, b):
        a.copy_(w)
        b.fill_(7)

    source = torch.tensor([1.0, 2])
    plan = plan_of(write, source, a=memory[:2], b=torch.zeros(3))
    both = torch.zeros(4)
    DirectWrites(plan, {"a": both[:2], "b": both[1:]}).run({"w": source})
    assert both.tolist() == [1, 2, 7, 7]
