"""Every dtype and shape survives a trip through one buffer, bit for bit."""

import pytest
import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest
from vllm_wt.packing import ALIGNMENT, DTYPES, Layout, as_bytes, meta_of

SHAPES = [(), (1,), (3,), (7, 5), (0,), (0, 128), (2, 3, 4)]


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = 1
    for dim in shape:
        numel *= dim
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_round_trip(name):
    tensors = {str(shape): _random(DTYPES[name], shape) for shape in SHAPES}
    layout = Layout(Manifest(tuple(meta_of(n, t) for n, t in tensors.items())))
    buffer = torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8)
    for slot in layout.slots:
        buffer[slot.offset : slot.offset + slot.nbytes] = as_bytes(tensors[slot.tensor.name])
    views = dict(layout.views(buffer))
    assert list(views) == list(tensors)
    for key, tensor in tensors.items():
        assert views[key].shape == tensor.shape
        assert views[key].dtype == tensor.dtype
        assert torch.equal(as_bytes(views[key]), as_bytes(tensor))


def test_mixed_dtypes_are_aligned_and_do_not_overlap():
    tensors = [_random(DTYPES[name], (3,)) for name in sorted(DTYPES)]
    layout = Layout(Manifest(tuple(meta_of(str(i), t) for i, t in enumerate(tensors))))
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot.nbytes
    assert layout.nbytes == end


@pytest.mark.parametrize("alignment", [16, 64, 4096])
def test_another_alignment(alignment):
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (1, alignment, alignment + 1, 3)]
    metas = tuple(meta_of(str(number), tensor) for number, tensor in enumerate(tensors))
    layout = Layout(Manifest(metas), alignment)
    assert [slot.offset // alignment for slot in layout.slots] == [0, 1, 2, 4]
    assert all(slot.offset % alignment == 0 for slot in layout.slots)
    assert layout.nbytes == 4 * alignment + 3


@pytest.mark.parametrize("alignment", [-16, 0, 1, 8, 24, 100])
def test_an_alignment_that_suits_not_all_is_refused(alignment):
    with pytest.raises(InvalidInfo, match="power of two"):
        Layout(Manifest((meta_of("a", torch.zeros(3)),)), alignment)


def test_only_empty_tensors():
    layout = Layout(Manifest((meta_of("e", torch.empty(0)),)))
    ((_, view),) = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    assert view.shape == (0,)
