"""A trainer process pushes weights into a real engine, which then generates with them."""

from __future__ import annotations

import pytest

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
