"""Shards that a trainer declares itself."""

import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.sources import DeclaredShards, joined

FULL = torch.arange(35.0).reshape(7, 5)


def declared(*rows):
    part = FULL[slice(*rows)].clone()
    return {"w": ((rows[0], 0), (7, 5), part), "scalar": ((), (), torch.tensor(2.0))}


def test_two_ranks():
    sources = [
        DeclaredShards(declared(0, 4), rank=0, ranks=2),
        DeclaredShards(declared(4, 7), rank=1, ranks=2),
    ]
    layout = joined([source.layout() for source in sources])
    assert layout.tensors == (
        TensorMeta("w", "float32", (7, 5)),
        TensorMeta("scalar", "float32", ()),
    )
    assert layout.rank.tolist() == [0, 0, 1, 1]
    pieces = [piece for source in sources for piece in source.pieces() if piece.name == "w"]
    assert torch.equal(torch.cat([piece.tensor for piece in pieces]), FULL)
    assert [piece.start for piece in pieces] == [(0, 0), (4, 0)]


def test_in_place_and_read_anew():
    state = declared(0, 7)
    source = DeclaredShards(state)
    pieces = source.pieces()
    assert pieces[0].tensor.data_ptr() == state["w"][2].data_ptr()
    assert source.device == state["w"][2].device
    assert source.is_same()
    state["w"] = declared(0, 7)["w"]
    assert not source.is_same()
    assert source.pieces()[0].tensor.data_ptr() == state["w"][2].data_ptr()
    tensor = state["w"][2][:4]
    state["w"] = ((0, 0), (7, 5), tensor)
    assert not source.is_same()
    source.pieces()
    state["w"] = ((3, 0), (7, 5), tensor)
    assert not source.is_same()


def test_what_has_no_elements_is_no_piece():
    tensors = [TensorMeta("w", "float32", (7, 5))]
    source = DeclaredShards({"w": ((7, 0), (7, 5), torch.empty(0, 5))}, tensors=tensors)
    assert source.pieces() == []
    assert len(source.layout()) == 0


@pytest.mark.parametrize(
    ("start", "shape", "local"),
    [
        ((4, 0), (7, 5), torch.ones(4, 5)),
        ((-1, 0), (7, 5), torch.ones(4, 5)),
        ((0,), (7, 5), torch.ones(4, 5)),
        ((0, 0), (7, 5), torch.ones(20)),
        ((0, 0), (7, 6), torch.ones(4, 5)),
        ((0, 0), (7, 5), torch.ones(4, 5, dtype=torch.bfloat16)),
    ],
)
def test_boxes_that_do_not_fit(start, shape, local):
    tensors = [TensorMeta("w", "float32", (7, 5))]
    source = DeclaredShards({"w": (start, shape, local)}, tensors=tensors, rank=1, ranks=2)
    with pytest.raises(ManifestMismatch) as caught:
        source.pieces()
    assert caught.value.where == "declared of rank 1"
    assert "'w'" in caught.value.what
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.cure


@pytest.mark.parametrize(
    "entry",
    [
        torch.ones(7, 5),
        ((0, 0), torch.ones(7, 5)),
        ((0, None), (7, 5), torch.ones(7, 5)),
        ((0.5, 0), (7, 5), torch.ones(7, 5)),
        ((0, 0), (7, float("nan")), torch.ones(7, 5)),
        ((0, 0), (7, 5), [1.0]),
        ((0, 0), (7, 5), torch.ones(7, 5, device="meta")),
    ],
)
def test_entries_that_are_none(entry):
    with pytest.raises(InvalidInfo) as caught:
        DeclaredShards({"w": entry})
    assert "'w'" in caught.value.what
    assert caught.value.expected
    assert caught.value.cure


def test_joining():
    with pytest.raises(InvalidInfo):
        joined([])
    layout = DeclaredShards(declared(0, 7), rank=1, ranks=2).layout()
    with pytest.raises(ManifestMismatch) as caught:
        joined([layout])
    assert caught.value.where == "layout of rank 0"
    assert Layout.from_wire(layout.to_wire()).digest == layout.digest
