"""A source that says what will be sent, and has no values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.source import Announced, StateDictSource, WeightSource, as_source, take_part
from vllm_wt.sources.announced import handed_over

METAS = (
    TensorMeta("a", "bfloat16", (3, 4)),
    TensorMeta("b", "float32", ()),
    TensorMeta("c", "uint8", (0, 2)),
)
TRIPLES = [(meta.name, meta.dtype, meta.shape) for meta in METAS]


class Entry:
    def __init__(self, meta: TensorMeta) -> None:
        self.name, self.dtype, self.shape = meta.name, getattr(torch, meta.dtype), meta.shape


class Vllms:
    """A source of vLLM's whose pass would be a collective."""

    def metadata(self):
        return [Entry(meta) for meta in METAS]

    def __iter__(self):
        raise AssertionError("it was walked")


class Ours(WeightSource):
    def manifest(self) -> Manifest:
        return Manifest(METAS)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("it was walked")

    device = torch.device("meta")
    made = frozenset(meta.name for meta in METAS)


def tensors(device):
    return {
        meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device)
        for meta in METAS
    }


@pytest.mark.parametrize(
    "what",
    [
        Manifest(METAS),
        tensors("cpu"),
        tensors("meta"),
        tensors("meta").items(),
        (pair for pair in tensors("cpu").items()),
        [(meta.name, getattr(torch, meta.dtype), meta.shape) for meta in METAS],
        ((meta.name, meta.dtype, list(meta.shape)) for meta in METAS),
        [(m.name, f"torch.{m.dtype}", torch.Size(m.shape)) for m in METAS],
        [[m.name, m.dtype, np.array(m.shape, dtype=np.int64)] for m in METAS],
        list(tensors("meta").items()),
        StateDictSource(tensors("meta")),
        Ours(),
        Vllms(),
        Announced(Manifest(METAS)),
    ],
    ids=lambda what: type(what).__name__,
)
def test_what_can_be_announced(what):
    source = Announced(what)
    assert source.manifest() == Manifest(METAS)
    assert source.made == {"a", "b", "c"}
    assert list(source.at_hand()) == []
    assert as_source(source) is source


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module(device):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    assert [tensor.name for tensor in Announced(module).manifest().tensors] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]


def test_no_tensor_is_kept():
    alive = torch.ones(3)
    kept = StateDictSource({"a": alive})
    source = Announced(kept)
    kept._state = {}
    assert source.manifest().tensors == (TensorMeta("a", "float32", (3,)),)
    assert not any(value is alive for value in vars(source).values())


def test_where_the_tensors_will_be():
    assert Announced(tensors("cpu")).device == torch.device("cpu")
    assert Announced(tensors("meta")).device == StateDictSource({}).device
    assert Announced(tensors("cpu"), device="cuda:1").device == torch.device("cuda", 1)
    assert Announced(Manifest(METAS), device="cuda:1").device == torch.device("cuda", 1)
    assert Announced(Ours(), device="cpu").device == torch.device("cpu")
    assert Announced(Announced(TRIPLES, device="cuda:1")).device.index == 1


def test_it_has_no_values():
    with pytest.raises(InvalidInfo, match="has no values") as error:
        next(iter(Announced(Manifest(METAS))))
    assert "begin, send and end" in error.value.cure
    with pytest.raises(InvalidInfo, match="has no values"):
        take_part(Announced(Manifest(METAS)))


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (None, InvalidInfo, "does not say what will be sent"),
        ("folder", InvalidInfo, "does not say what will be sent"),
        (torch.ones(3), InvalidInfo, "does not say what will be sent"),
        (nn.Linear, InvalidInfo, "does not say what will be sent"),
        ([torch.ones(3)], InvalidInfo, "does not describe a tensor"),
        ([("a", torch.float32)], InvalidInfo, "does not describe a tensor"),
        ([("a", torch.float32, 3)], InvalidInfo, "does not describe a tensor"),
        ([("a", torch.float32, ("x",))], InvalidInfo, "does not describe a tensor"),
        ([("a", float, (3,))], InvalidInfo, "does not describe a tensor"),
        ([(3, torch.float32, (3,))], InvalidInfo, "does not describe a tensor"),
        ({3: torch.ones(3)}, InvalidInfo, "not a name"),
        ({3: torch.ones(3, device="meta")}, InvalidInfo, "not a name"),
        ({"a": torch.ones(3).to_sparse()}, InvalidInfo, "not a dense tensor"),
        ({"a": 3}, InvalidInfo, "does not describe a tensor"),
        (nn.LazyLinear(3), InvalidInfo, "has no shape yet"),
        ([("a", "float99", (3,))], ManifestMismatch, "cannot be sent"),
        ([("a", "int8", (-1,))], ManifestMismatch, "impossible shape"),
        ([("a", "int8", (3,))] * 2, ManifestMismatch, "occurs twice"),
        ([], ManifestMismatch, "no tensors"),
        ({}, ManifestMismatch, "no tensors"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_announced(what, error, text):
    with pytest.raises(error, match=text) as caught:
        Announced(what)
    assert caught.value.cure


def test_what_is_handed_over_is_detached_and_itself():
    parameter = nn.Parameter(torch.ones(3))
    [(name, tensor)] = handed_over({"a": parameter})
    assert name == "a"
    assert not tensor.requires_grad
    assert tensor.data_ptr() == parameter.data_ptr()


class Walked(WeightSource):
    """Counts what of it is alive."""

    def __init__(self) -> None:
        self.alive = self.most = self.walks = 0

    def manifest(self) -> Manifest:
        raise AssertionError("it is only to be walked")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(5):
            yield f"t{index}", _Counted(self)  # type: ignore[misc]
        self.walks += 1


class _Counted:
    def __init__(self, source: Walked) -> None:
        self.source = source
        source.alive += 1
        source.most = max(source.most, source.alive)

    def __del__(self) -> None:
        self.source.alive -= 1


def test_taking_part_walks_once_and_keeps_nothing():
    source = Walked()
    take_part(source)
    assert (source.walks, source.alive, source.most) == (1, 0, 1)


def test_taking_part_in_nothing():
    with pytest.raises(InvalidInfo, match="cannot be a source"):
        take_part(iter([]))
