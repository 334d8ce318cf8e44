"""A trainer process pushes weights into a real engine, which then generates with them."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_three_rounds_generate_what_transformers_generates(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", version)
        result = trainer.call("push", version)
        tokens = engine.tokens()
        assert tokens == engine.reference(checkpoint)
        assert tokens not in seen
        seen.append(tokens)
        assert result["version"] == version
        assert engine.llm.get_weight_version() == str(version)
        assert [state["version"] for state in engine.state()] == [version] * engine.tp
        assert [state["meta"] for state in engine.state()] == [[]] * engine.tp
        engine.assert_in_step()


def test_each_rank_reads_its_slices(engine):
    """In blocks of 4096 bytes; columns with the short gaps between them."""
    trainer = engine.trainer()
    trainer.call("connect")
    checkpoint = trainer.call("randomize", 1)
    trainer.call("push", 1)
    expected = [0] * engine.tp
    padded = -(-engine.shape.vocab // 64) * 64
    for name, tensor in load_file(f"{checkpoint}/model.safetensors").items():
        for rank in range(engine.tp):
            row = tensor[0].nbytes
            rows = len(tensor) // engine.tp
            if "norm" in name:
                first, last = 0, tensor.nbytes
            elif "o_proj" in name or "down_proj" in name:
                first = rank * row // engine.tp
                last = first + tensor.nbytes - row + row // engine.tp
            elif "embed" in name or "lm_head" in name:
                first = rank * (padded // engine.tp) * row
                last = min(first + padded // engine.tp * row, tensor.nbytes)
            else:
                first, last = rank * rows * row, (rank + 1) * rows * row
            end = min(-(-last // 4096) * 4096, tensor.nbytes)
            expected[rank] += end - first // 4096 * 4096
    assert engine.rpc("wt_bytes_read") == expected
