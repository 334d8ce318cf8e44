"""vLLM 0.33's own sources, by stand-ins of the shape that its ``weight_transfer/base.py`` has."""

from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.sources import VllmShards, joined


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = field(default=None, kw_only=True)
    mesh_shape: tuple | None = field(default=None, kw_only=True)
    placements: tuple | None = field(default=None, kw_only=True)


FULL = {
    "rows": torch.arange(21.0).reshape(7, 3),
    "grid": torch.arange(35.0).reshape(5, 7),
    "outer": torch.arange(13.0),
    "whole": torch.arange(4.0).to(torch.bfloat16),
    "owned": torch.arange(6.0).reshape(2, 3),
}
TWO = {"owners": (2, 0, 3, 1), "mesh_shape": (2, 2)}
METAS = [
    ParamMeta(
        "rows", torch.float32, (7, 3), owners=(1, 3), mesh_shape=(2,), placements=(Shard(0),)
    ),
    ParamMeta("grid", torch.float32, (5, 7), placements=(Shard(1), Shard(0)), **TWO),
    ParamMeta("outer", torch.float32, (13,), placements=(Replicate(), Shard(0)), **TWO),
    ParamMeta("whole", torch.bfloat16, (4,)),
    ParamMeta("owned", torch.float32, (2, 3), owners=(2,), mesh_shape=(1,)),
]
LOCAL = {
    0: {"grid": FULL["grid"][3:, :4], "outer": FULL["outer"][7:]},
    1: {"rows": FULL["rows"][:4], "grid": FULL["grid"][3:, 4:], "outer": FULL["outer"][7:]},
    2: {"grid": FULL["grid"][:3, :4], "outer": FULL["outer"][:7], "owned": FULL["owned"]},
    3: {"rows": FULL["rows"][4:], "grid": FULL["grid"][:3, 4:], "outer": FULL["outer"][:7]},
}


class Source:
    """One rank's."""

    def __init__(self, rank, metas=METAS):
        local = LOCAL[rank] | {"whole": FULL["whole"]}
        self.items = [(meta.name, local[meta.name]) for meta in METAS if meta.name in local]
        self.metas = metas
        self.asked = 0

    @cached_property
    def metadata(self):
        self.asked += 1
        return self.metas

    def iter_local(self):
        yield from self.items


class OnlyFull(Source):
    """It inherits ``iter_local``, and says that it has none."""

    def implements_iter_local(self):
        return False


class Before:
    """Of 0.32."""

    def metadata(self):
        return METAS

    def __iter__(self):
        yield from FULL.items()


def test_all_ranks():
    sources = [VllmShards(Source(rank), rank=rank, ranks=4) for rank in range(4)]
    layout = joined([source.layout() for source in sources])
    assert layout.tensors == tuple(
        TensorMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in FULL.items()
    )
    for rank, source in enumerate(sources):
        pieces = source.pieces()
        assert source.made == {name for name, _ in source._source.items}
        assert [piece.name for piece in pieces] == [name for name, _ in source._source.items]
        assert not source.is_same()
        assert source.device == torch.device("cpu")
        assert source._source.asked == 1, rank
        for piece in pieces:
            sizes = zip(piece.start, piece.tensor.shape, strict=True)
            box = tuple(slice(start, start + size) for start, size in sizes)
            assert torch.equal(FULL[piece.name][box], piece.tensor)


def test_order_and_names():
    for items in (
        Source(1).items[::-1],
        Source(1).items[:-1],
        [*Source(1).items, ("more", FULL["outer"])],
        [("other", FULL["outer"])],
    ):
        source = Source(1)
        source.items = items
        with pytest.raises(ManifestMismatch) as caught:
            VllmShards(source, rank=1, ranks=4).pieces()
        assert "metadata" in caught.value.what
        assert caught.value.where == "vLLM's WeightSource of rank 1"
        assert caught.value.expected != caught.value.got


def test_values_that_differ_from_the_metadata():
    source = Source(1)
    source.items[0] = ("rows", FULL["rows"])
    with pytest.raises(ManifestMismatch) as caught:
        VllmShards(source, rank=1, ranks=4).pieces()
    assert "'rows'" in caught.value.what
    assert "[4, 3]" in caught.value.expected
    source.items[0] = ("rows", FULL["rows"][:4].bfloat16())
    with pytest.raises(ManifestMismatch) as caught:
        VllmShards(source, rank=1, ranks=4).pieces()
    assert (caught.value.expected, caught.value.got) == ("float32", "bfloat16")


@pytest.mark.parametrize("source", [OnlyFull(0), Before(), {"w": FULL["outer"]}])
def test_sources_that_do_not_yield_shards(source):
    with pytest.raises(InvalidInfo) as caught:
        VllmShards(source, rank=0, ranks=4)
    assert type(source).__name__ in caught.value.got
    assert caught.value.cure
