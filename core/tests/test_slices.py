"""What of the full tensors is read for a plan, and that the narrowed plan asks for just that.

That it writes the same is part of every test that replays a plan.
"""

import pytest
import torch

from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.recorder import record
from vllm_wt.loading.slices import sliced
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import meta_of

from .support.replaying import cut, replay


def plan_of(write, out, **sources):
    """The plan of a load that ``write(out, name, tensor)`` does tensor by tensor."""
    model = torch.nn.Module()
    model.out = torch.nn.Parameter(out, requires_grad=False)
    manifest = Manifest(tuple(meta_of(name, tensor) for name, tensor in sources.items()))
    return record(
        model, lambda weights: [write(model.out.data, n, w) for n, w in weights], manifest
    )


def columns(out, name, tensor):
    """Two of eight columns, of the tensor ``w`` alone."""
    if name == "w":
        out.copy_(tensor[:, 2:4])


def test_only_the_columns_are_read():
    plan = plan_of(columns, torch.zeros(3, 2), w=torch.zeros(3, 8))
    slices = sliced(plan, gap=0)
    assert slices.plan.manifest.tensors == (TensorMeta("w", "float32", (6,)),)
    assert slices.runs == {"w": ((8, 8), (40, 8), (72, 8))}
    assert slices.nbytes == 24
    (copy,) = slices.plan.copies
    assert (copy.source_offset, copy.source_strides, copy.shape) == (0, (1,), (6,)) or (
        copy.source_offset == 0 and copy.source_strides == (2, 1)
    )


def test_a_gap_that_is_not_worth_a_read_is_read():
    plan = plan_of(columns, torch.zeros(3, 2), w=torch.zeros(3, 8))
    assert sliced(plan, gap=23).nbytes == 24
    slices = sliced(plan, gap=24)
    assert slices.runs == {"w": ((8, 72),)}
    assert slices.plan.copies[0].source_strides == (8, 1)


def test_reads_are_aligned_but_for_the_end_of_a_tensor():
    plan = plan_of(lambda out, _, w: out.copy_(w[1:]), torch.zeros(6), w=torch.zeros(7))
    assert sliced(plan, gap=0, alignment=16).runs == {"w": ((0, 28),)}
    plan = plan_of(lambda out, _, w: out.copy_(w[5:]), torch.zeros(2), w=torch.zeros(7))
    assert sliced(plan, gap=0, alignment=16).runs == {"w": ((16, 12),)}


def test_an_alignment_that_is_no_multiple_of_the_element():
    plan = plan_of(lambda out, _, w: out.copy_(w[5:6]), torch.zeros(1), w=torch.zeros(9))
    assert sliced(plan, gap=0, alignment=6).runs == {"w": ((12, 12),)}


@pytest.mark.parametrize(("most", "count"), [(3, 3), (2, 1), (1, 1), (0, 1)])
def test_too_many_runs_become_fewer(most, count):
    plan = plan_of(columns, torch.zeros(3, 2), w=torch.zeros(3, 8))
    assert len(sliced(plan, gap=1, most=most).runs["w"]) == count


def test_what_nothing_takes_is_not_read():
    plan = plan_of(columns, torch.zeros(3, 2), w=torch.zeros(3, 8), other=torch.zeros(5))
    slices = sliced(plan)
    assert plan.unused == ("other",)
    assert [tensor.name for tensor in slices.plan.manifest.tensors] == ["w"]
    assert slices.runs.keys() == {"w"}


def test_a_plan_that_needs_nothing_reads_one_tensor():
    """An update consists of at least one."""
    plan = plan_of(columns, torch.zeros(3, 2), first=torch.zeros(2), other=torch.zeros(5))
    assert sliced(plan).runs == {"first": ((0, 8),)}


def test_what_is_read_in_full_keeps_its_form():
    plan = plan_of(lambda out, _, w: out.copy_(w.t()), torch.zeros(4, 3), w=torch.zeros(3, 4))
    slices = sliced(plan, gap=0)
    assert slices.plan.manifest == plan.manifest
    assert slices.plan.copies == plan.copies
    assert slices.runs == {"w": ((0, 48),)}


def test_fallbacks_are_read_in_full():
    def write(out, name, tensor):
        out.copy_(tensor[0] + 1)

    plan = plan_of(write, torch.zeros(4), w=torch.zeros(3, 4))
    assert plan.fallbacks
    assert sliced(plan).runs == {"w": ((0, 48),)}
    manifest = Manifest((TensorMeta("a", "float32", (2, 2)), TensorMeta("empty", "int8", (0,))))
    slices = sliced(LoadPlan.of_whole(manifest, "a reason"))
    assert slices.runs == {"a": ((0, 16),), "empty": ()}
    assert slices.plan.manifest == manifest


def test_unevenly_spaced_rows():
    """Rows 0, 1, 5, 9, 11 and 12: no one stride leads from each to the next."""

    def write(out, name, tensor):
        for n, row in enumerate((0, 1, 5, 9, 11, 12)):
            out[n].copy_(tensor[row, 2:9])

    source = torch.arange(256.0).view(16, 16)
    plan = plan_of(write, torch.zeros(6, 7), w=source)
    got = {"out": torch.zeros(6, 7)}
    replay(plan, {"w": source}, got)
    assert torch.equal(got["out"], source[[0, 1, 5, 9, 11, 12], 2:9])
    assert cut(sliced(plan, gap=0), {"w": source})["w"].numel() == 42
