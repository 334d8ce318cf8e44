"""Weights that are sent in another dtype than the trainer keeps them in."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.source import Cast, StateDictSource

from .support.engines import InProcessEngine, connecting


@pytest.fixture
def state():
    return {
        "wide": torch.randn(500, 30),
        "half": torch.randn(40).bfloat16(),
        "scalar": torch.tensor(1 / 3, dtype=torch.float64),
        "turned": torch.randn(6, 7).t(),
        "whole": torch.arange(9),
        "small": torch.randn(8).to(torch.float8_e4m3fn),
    }


def test_what_is_said_and_what_is_made(state):
    source = Cast(StateDictSource(state), torch.bfloat16)
    dtypes = {tensor.name: tensor.dtype for tensor in source.manifest().tensors}
    assert dtypes == dict.fromkeys(state, "bfloat16") | {"whole": "int64"}
    assert source.made == {"wide", "scalar", "turned", "small"}
    assert [name for name, _ in source.at_hand()] == ["half", "whole"]
    assert dict(source.at_hand())["half"] is not None
    assert {n: (t.dtype, t.shape) for n, t in source} == {
        n: (torch.int64 if n == "whole" else torch.bfloat16, t.shape) for n, t in state.items()
    }


def test_it_arrives_rounded(monkeypatch, transport_cls, loader, state):
    with connecting(monkeypatch, transport_cls) as connect:
        sync = connect(
            InProcessEngine(transport_cls, loader), Cast(StateDictSource(state), torch.bfloat16)
        )
        for version in (1, 2):
            state["wide"].add_(1)
            result = sync.push(version)
            for name, tensor in state.items():
                expected = tensor if name == "whole" else tensor.to(torch.bfloat16)
                assert torch.equal(loader.weights[name], expected), name
    assert result.nbytes == 2 * (500 * 30 + 40 + 1 + 42 + 8) + 72


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "bfloat16", None, torch.bool])
def test_what_cannot_be_cast_to(state, dtype):
    with pytest.raises(InvalidInfo, match="cannot be cast"):
        Cast(StateDictSource(state), dtype)
