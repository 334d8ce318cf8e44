"""Which boxes a rank of a mesh holds, against indices that are divided one by one."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from vllm_wt.errors import ManifestMismatch
from vllm_wt_sharded.sources.meshes import divided, pieces_of

CASES = [
    ((257, 3), (3,), [Shard(0)]),
    ((4, 7), (3,), [Shard(1)]),
    ((2, 3), (5,), [Shard(0)]),
    ((), (2,), [Replicate()]),
    ((0, 3), (2,), [Shard(0)]),
    ((5,), (2, 2), [Replicate(), Partial()]),
    ((13, 5), (2, 3), [Shard(0), Shard(1)]),
    ((13, 5), (2, 3), [Shard(0), Shard(0)]),
    ((13, 5), (2, 3), [Replicate(), Shard(0)]),
    ((13, 5, 2), (2, 2, 2), [Shard(1), Replicate(), Shard(0)]),
    ((12, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((10, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((24,), (2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]),
    ((3, 12), (2, 2), [_StridedShard(1, split_factor=3), Replicate()]),
    ((12, 12), (2, 2), [_StridedShard(1, split_factor=2), _StridedShard(0, split_factor=3)]),
]


def kept(indices, placement, count, index):
    """What a rank keeps of a tensor, as torch's chunk divides it."""
    if type(placement) in (Replicate, Partial):
        return indices
    parts = getattr(placement, "split_factor", 1)
    found = []
    for part in indices.chunk(parts, placement.dim):
        chunks = part.chunk(count, placement.dim)
        # chunk makes fewer where it runs out of rows.
        found.append(chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0))
    return torch.cat(found, placement.dim)


@pytest.mark.parametrize(("shape", "mesh", "placements"), CASES)
def test_every_rank_of_a_mesh(shape, mesh, placements):
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh)):
        local = full
        for step in zip(placements, mesh, coordinate, strict=True):
            local = kept(local, *step)
        dims = divided(shape, mesh, placements, coordinate)
        shape_of, first = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        assert tuple(sum(length for _, length in runs) for runs in dims) == shape_of
        pieces = pieces_of("w", local, dims, where="here")
        assert sum(piece.tensor.numel() for piece in pieces) == local.numel()
        if pieces:
            assert pieces[0].start == first
        for piece in pieces:
            box = tuple(
                slice(s, s + n) for s, n in zip(piece.start, piece.tensor.shape, strict=True)
            )
            assert torch.equal(full[box], piece.tensor)
            if len(local.shape):
                assert piece.tensor.untyped_storage().data_ptr() == (
                    local.untyped_storage().data_ptr()
                )
            seen[box] += 1
    replicas = (
        torch.Size(mesh).numel()
        // torch.Size(
            [n for n, p in zip(mesh, placements, strict=True) if hasattr(p, "dim")]
        ).numel()
    )
    assert (seen == replicas).all()


def test_boxes_are_as_few_as_can_be():
    whole = divided((12,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (1, 0))
    assert whole == [[(3, 3)]]
    strided = [_StridedShard(0, split_factor=2)]
    assert divided((12,), (2,), strided, (0,)) == [[(0, 3), (6, 3)]]
    assert divided((12,), (1,), strided, (0,)) == [[(0, 12)]]


def test_what_torch_divides_wrongly_is_refused():
    """FSDP2 leaves 7 rows over tp 2 x dp 3 as 4 and 3: of the last rank of dp, 0 and 1; the placement
    says 1 and 0."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    dims = divided((7,), (3, 2), placements, (2, 0))
    with pytest.raises(ManifestMismatch) as caught:
        pieces_of("w", torch.empty(0), dims, where="here")
    assert (caught.value.where, caught.value.got) == ("here", "[0]")
    assert "[1]" in caught.value.expected
    assert caught.value.cure


@pytest.mark.parametrize("shape", [(3, 0), (0,)])
def test_a_tensor_without_elements(shape):
    """Torch keeps an empty part in some other shape."""
    dims = divided((5, 0), (2,), [Shard(0)], (0,))
    assert pieces_of("w", torch.empty(shape), dims, where="here") == []
