"""Strided copies as runs of addresses, for the kernel that copies them."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_wt.packing import strided
from vllm_wt.packing.strided import runs_of


def copied(to, source):
    """Copies what the runs say, and nothing else."""
    for address, origin, nbytes in runs_of(to, source).tolist():
        ctypes.memmove(address, origin, nbytes)


def views(base, order, starts, sizes):
    """A strided part of a tensor, its dimensions in another order."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        base = base.narrow(dim, start, size)
    return base.permute(order)


@settings(deadline=None)
@given(st.data())
def test_runs_copy_exactly_the_elements(data):
    rank = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(1, 5), min_size=rank, max_size=rank))
    dtype = data.draw(st.sampled_from([torch.int64, torch.float16, torch.uint8]))
    tensors = []
    for seed in (1, 2):
        order = data.draw(st.permutations(range(rank)))
        inverse = [order.index(dim) for dim in range(rank)]
        sizes = [shape[inverse[dim]] for dim in range(rank)]
        margins = data.draw(st.lists(st.integers(0, 2), min_size=rank, max_size=rank))
        outer = [size + 2 * margin for size, margin in zip(sizes, margins, strict=True)]
        base = torch.randint(0, 100, outer, generator=torch.Generator().manual_seed(seed))
        base = base.to(dtype)
        tensors.append((base, views(base, order, margins, sizes)))
    (to_base, to), (_, source) = tensors
    assert list(to.shape) == list(source.shape)
    wanted = to_base.clone()
    expected = wanted.as_strided(to.shape, to.stride(), to.storage_offset())
    expected.copy_(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_SHORTEST", 1)
        copied(to, source)
    assert torch.equal(to_base, wanted)


def test_what_is_contiguous_on_both_sides_is_one_run():
    to, source = torch.zeros(64, 1024), torch.ones(64, 2048)
    assert runs_of(to, source[:, :1024]).shape == (64, 3)
    assert runs_of(to, source.view(128, 1024)[:64]).shape == (1, 3)
    assert runs_of(to, source[:1, :1024].expand(64, 1024)).shape == (64, 3)


def test_short_runs_and_many_are_left_to_others():
    to = torch.zeros(64, 127)
    assert runs_of(to, torch.ones(64, 200)[:, :127]) is None  # 508 bytes each
    assert runs_of(torch.zeros(8, 8), torch.ones(8, 8).t()) is None
    assert runs_of(torch.zeros(4, 0), torch.zeros(4, 0)) is None
    many = torch.zeros(1, dtype=torch.uint8).expand((1 << 18) + 1, 512)
    assert runs_of(many, many) is None
