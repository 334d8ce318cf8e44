"""What the model does not take is refused at connect, before any layer is touched."""

from __future__ import annotations

import pytest
import torch

from vllm_wt import WeightSync
from vllm_wt.errors import LoadError
from vllm_wt.testing.models import random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


def _without(name):
    def change(state):
        del state[name]

    return change


def _add_unknown(state):
    state["model.layers.7.mlp.up_proj.weight"] = torch.ones(4, 4)


def _transpose(state):
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].t().contiguous()


def _compiled(state):
    for name in list(state):
        state[f"_orig_mod.{name}"] = state.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(NORM), "model.norm.weight"),
        (_without(K_PROJ), "model.layers.1.self_attn.qkv_proj.weight"),
        (_without("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (_add_unknown, "does not take these weights: it refuses 'model.layers.7.mlp.up_proj"),
        (_transpose, "does not take these weights: it refuses 'model.embed_tokens.weight'"),
        (_compiled, "Cure: torch.compile has wrapped the module: give model._orig_mod"),
    ],
    ids=[
        "missing",
        "part of a fused one missing",
        "embedding missing",
        "unknown",
        "wrong shape",
        "compiled",
    ],
)
def test_refused_at_connect(engine, change, message):
    state = dict(random_model(engine.shape, seed=50).named_parameters())
    change(state)
    old, digests = engine.tokens(), engine.checksums()
    with pytest.raises(LoadError) as error:
        WeightSync.connect(engine.llm, backend="rdma", source=state)
    assert message in str(error.value)
    assert error.value.cure
    engine.assert_in_step()
    assert [state["meta"] for state in engine.state()] == [[]] * engine.tp
    assert engine.checksums() == digests
    assert engine.tokens() == old


def test_the_next_right_source_is_taken(engine):
    model = random_model(engine.shape, seed=51)
    old = engine.tokens()
    with WeightSync.connect(engine.llm, backend="rdma", source=model) as sync:
        sync.push(1)
    assert engine.tokens() != old
    engine.assert_in_step()
