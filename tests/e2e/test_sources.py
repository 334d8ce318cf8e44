"""Sources of each kind into a real engine, which then generates what transformers generates."""

from __future__ import annotations

import pytest

from vllm_wt import SafetensorsSource, WeightSync
from vllm_wt.testing.models import random_model, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def _vllms_own(model, folder):
    from vllm.distributed.weight_transfer.base import ModuleSource

    return ModuleSource(model)


@pytest.mark.parametrize(
    "make",
    [
        _vllms_own,
        lambda model, folder: SafetensorsSource(folder),
        lambda model, folder: dict(model.named_parameters()),
        lambda model, folder: list(model.named_parameters()),
    ],
    ids=["vLLM's ModuleSource", "checkpoint folder", "mapping", "pairs"],
)
def test_what_a_source_may_be(engine, tmp_path, make):
    model = random_model(engine.shape, seed=950)
    save_checkpoint(model, tmp_path / "checkpoint")
    # Another model's weights first, so that the ones below are seen to arrive.
    for weights in (random_model(engine.shape, seed=951), make(model, tmp_path / "checkpoint")):
        before = engine.tokens()
        with WeightSync.connect(engine.llm, backend="rdma", source=weights) as sync:
            sync.push(1)
        assert engine.tokens() != before
    assert engine.tokens() == engine.reference(tmp_path / "checkpoint")
    engine.assert_in_step()
