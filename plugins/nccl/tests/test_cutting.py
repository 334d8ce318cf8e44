"""Who sends which bytes: against the shards that torch cuts, and what a peer says of it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt_nccl.cutting import Cuts, divided, of_one
from vllm_wt_nccl.info import NcclInitInfo
from vllm_wt_nccl.ranges import holders

SHAPES: list[tuple[int, ...]] = [
    *[(9,), (1,), (2,), (257, 3), (4, 6), (3, 1, 5), (1, 7, 2), (1, 1, 8), (5, 0), (0,), (64, 8)],
    (),
]
MESHES: list[torch.Tensor] = [
    torch.arange(1),
    torch.arange(3),
    torch.tensor([4, 2, 7, 1]),
    torch.arange(4).view(2, 2),
    torch.arange(6).view(3, 2),
    torch.arange(6).view(2, 3).flip(1),
    torch.arange(4).view(1, 4),
    torch.arange(4).view(4, 1),
    torch.arange(8).view(2, 2, 2),
]


def _dtensor(shape: Sequence[int], mesh: torch.Tensor, placements: Sequence[Any]) -> Any:
    """Its form."""
    return SimpleNamespace(
        shape=torch.Size(shape),
        dim=lambda: len(shape),
        placements=tuple(placements),
        device_mesh=SimpleNamespace(mesh=mesh),
    )


def _placements(dims: int) -> list[Any]:
    return [Replicate(), Partial(), *map(Shard, range(dims)), _StridedShard(0, split_factor=2)]


def _shards(dtensor: Any) -> dict[int, list[int]] | None:
    """The oracle: the elements of each rank, as torch cuts them; None where it has other values."""
    found = {}
    for place in itertools.product(*map(range, dtensor.device_mesh.mesh.shape)):
        local = torch.arange(math.prod(dtensor.shape)).view(dtensor.shape)
        for placement, count, index in zip(
            dtensor.placements, dtensor.device_mesh.mesh.shape, place, strict=True
        ):
            if placement.is_partial() or (count > 1 and isinstance(placement, _StridedShard)):
                return None
            if isinstance(placement, Shard) and count > 1:
                parts = local.chunk(count, placement.dim)
                empty = local.narrow(placement.dim, 0, 0)
                local = parts[index] if index < len(parts) else empty
        found[int(dtensor.device_mesh.mesh[place])] = local.flatten().tolist()
    return found


def _cases() -> list[Any]:
    cases = []
    for shape, mesh in itertools.product(SHAPES, MESHES):
        each = _placements(len(shape)) if shape else [Replicate(), Partial()]
        for placements in itertools.product(each, repeat=mesh.dim()):
            cases.append(_dtensor(shape, mesh, placements))
    return cases


def test_ranges_are_the_shards_that_torch_cuts() -> None:
    held_by_all, apart = 0, 0
    for dtensor in _cases():
        found, shards = holders(dtensor), _shards(dtensor)
        if found is None:
            apart += 1
            continue
        assert shards is not None, dtensor
        expected: dict[tuple[int, int], list[int]] = {}
        for rank, elements in shards.items():
            if elements:
                run = list(range(elements[0], elements[0] + len(elements)))
                assert elements == run, dtensor
                expected.setdefault((run[0], run[-1] + 1), []).append(rank)
        assert {part: sorted(ranks) for part, ranks in found.items()} == {
            part: sorted(ranks) for part, ranks in expected.items()
        }, dtensor
        held_by_all += 1
    assert min(held_by_all, apart) > 500


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((257, 3), torch.arange(3), [Shard(0)]),
        ((1,), torch.arange(3), [Shard(0)]),
        ((257, 3), torch.arange(6).view(2, 3), [Replicate(), Shard(0)]),
        ((257, 3), torch.arange(6).view(2, 3), [Shard(0), Shard(0)]),
        ((1, 7, 2), torch.arange(3), [Shard(1)]),
        ((257, 3), torch.arange(3), [Replicate()]),
        ((257, 3), torch.arange(1), [_StridedShard(0, split_factor=2)]),
        ((257, 3), torch.arange(3), [Shard(-2)]),
    ],
)
def test_what_need_not_be_gathered(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: list[Any]
) -> None:
    assert holders(_dtensor(shape, mesh, placements)) is not None


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (torch.arange(3), [Shard(1)]),
        (torch.arange(3), [Partial()]),
        (torch.arange(1), [Partial()]),
        (torch.arange(2), [_StridedShard(0, split_factor=2)]),
        (torch.arange(4).view(2, 2), [Shard(0), Shard(1)]),
        (torch.arange(4).view(2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_what_has_to_be_gathered(mesh: torch.Tensor, placements: list[Any]) -> None:
    assert holders(_dtensor((64, 8), mesh, placements)) is None


def _assert_each_byte_once(cuts: Cuts) -> None:
    for tensor in cuts.manifest.tensors:
        counts = torch.zeros(tensor.nbytes, dtype=torch.int64)
        for segment in cuts.of[tensor.name]:
            assert segment.nbytes > 0
            assert segment.offset % ITEMSIZE[tensor.dtype] == 0
            counts[segment.offset : segment.offset + segment.nbytes] += 1
        assert bool((counts == 1).all()), tensor
    own = [cuts.own(sender) for sender in range(cuts.senders)]
    assert sum(each.nbytes for each in own) == cuts.manifest.nbytes


def test_each_byte_is_sent_once_by_a_rank_that_has_it() -> None:
    generator = random.Random(5)
    cases = _cases()
    for _ in range(300):
        dtensors = {f"w{n}": each for n, each in enumerate(generator.sample(cases, 12))}
        dtypes = ["float32", "bfloat16", "uint8"]
        metas = [
            TensorMeta(name, generator.choice(dtypes), tuple(dtensor.shape))
            for name, dtensor in dtensors.items()
        ]
        metas += [TensorMeta("plain", "float32", (33, 2)), TensorMeta("none", "float32", (0,))]
        manifest = Manifest(tuple(metas))
        ranks = list(range(8))
        generator.shuffle(ranks)
        cuts = divided(manifest, dtensors, ranks, "all")
        _assert_each_byte_once(cuts)
        assert cuts == Cuts.checked(manifest, cuts.senders, cuts.kinds, cuts.kind_of)
        for name, dtensor in dtensors.items():
            itemsize = ITEMSIZE[next(m.dtype for m in metas if m.name == name)]
            shards = _shards(dtensor)
            for sender, offset, nbytes in cuts.of[name]:
                assert ranks[sender] in dtensor.device_mesh.mesh
                if holders(dtensor) is not None:
                    assert shards is not None
                    first = offset // itemsize
                    elements = list(range(first, first + nbytes // itemsize))
                    assert shards[ranks[sender]] == elements


def test_what_any_rank_can_send_is_sent_in_turns() -> None:
    manifest = Manifest(tuple(TensorMeta(f"w{n}", "float32", (100,)) for n in range(12)))
    columns = {f"w{n}": _dtensor((10, 10), torch.arange(3), [Shard(1)]) for n in range(0, 12, 2)}
    cuts = divided(manifest, columns, [0, 1, 2], "all")
    assert [cuts.of[f"w{n}"][0].sender for n in range(12)] == [0, 1, 2] * 4
    copies = _dtensor((99,), torch.arange(6).view(2, 3), [Replicate(), Shard(0)])
    manifest = Manifest(tuple(TensorMeta(f"w{n}", "float32", (99,)) for n in range(4)))
    cuts = divided(manifest, dict.fromkeys(["w0", "w1", "w2", "w3"], copies), range(6), "all")
    assert [cuts.own(sender).nbytes for sender in range(6)] == [2 * 33 * 4] * 6


def test_ranks_outside_of_the_group_send_nothing() -> None:
    manifest = Manifest((TensorMeta("w", "float32", (99,)),))
    copies = _dtensor((99,), torch.arange(6).view(2, 3), [Replicate(), Shard(0)])
    cuts = divided(manifest, {"w": copies}, [3, 4, 5], "all")
    assert [segment.sender for segment in cuts.of["w"]] == [0, 1, 2]
    with pytest.raises(InvalidInfo, match="'w'"):
        divided(manifest, {"w": copies}, [6, 7], "all")


def test_one_sender() -> None:
    manifest = Manifest((TensorMeta("w", "float32", (99,)), TensorMeta("e", "float32", (0,))))
    sharded = {"w": _dtensor((99,), torch.arange(3), [Shard(0)])}
    assert divided(manifest, sharded, [0, 1, 2], "rank0") == of_one(manifest)
    _assert_each_byte_once(of_one(manifest))


MANIFEST = Manifest((TensorMeta("a", "float32", (6,)), TensorMeta("b", "bfloat16", (4,))))
GOOD: dict[str, Any] = {
    "senders": 2,
    "kinds": (((0, 12), (1, 12)), ((1, 8),)),
    "kind_of": (0, 1),
}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"senders": 0}, "senders"),
        ({"senders": 1 << 20}, "senders"),
        ({"senders": 1}, "ranks below 1"),
        ({"kinds": (((0, 12), (0, 12)), ((1, 8),))}, "each once"),
        ({"kinds": (((0, 12), (1, 8)), ((1, 8),))}, "'a'"),
        ({"kinds": (((0, 12), (1, 16)), ((1, 8),))}, "'a'"),
        ({"kinds": (((0, 10), (1, 14)), ((1, 8),))}, "'a'"),
        ({"kinds": (((0, 24), (1, 0)), ((1, 8),))}, "one byte or more"),
        ({"kinds": (((0, 12), (1, 12)), ())}, "'b'"),
        ({"kind_of": (0,)}, "one for each of 2"),
        ({"kind_of": (0, 2)}, "below 2"),
        ({"kind_of": (0, 0)}, "'b'"),
        ({"kinds": (), "kind_of": ()}, "one for each of 2"),
    ],
)
def test_what_a_peer_says_is_validated(wrong: dict[str, Any], named: str) -> None:
    assert Cuts.checked(MANIFEST, **GOOD).of["a"][1] == (1, 12, 12)
    with pytest.raises(InvalidInfo) as caught:
        Cuts.checked(MANIFEST, **(GOOD | wrong))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"senders": -1}, {"kinds": (((0, -12), (1, 36)),)}, {"kind_of": (-1, 0)}, {"kinds": ((0,),)}],
)
def test_what_is_no_number_does_not_pass_the_wire(wrong: dict[str, Any]) -> None:
    info = NcclInitInfo(
        session="s",
        tensors=NcclInitInfo.tensors_of(MANIFEST),
        manifest_digest=MANIFEST.digest,
        address="127.0.0.1",
        port=1,
        bucket_nbytes=4096,
        verify="digest",
        staging="auto",
        device="cpu",
        **GOOD,
    ).to_wire()
    assert NcclInitInfo.from_wire(info, backend="nccl").cuts(MANIFEST).kinds == GOOD["kinds"]
    with pytest.raises(InvalidInfo):
        NcclInitInfo.from_wire(info | wrong, backend="nccl")
