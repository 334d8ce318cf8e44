"""Why vLLM's worker is wrapped, and when that can end."""

from __future__ import annotations

import pytest

from vllm_wt.testing.models import ModelShape

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def engine_of_two(make_engine):
    yield from make_engine(ModelShape(), tp=2)


def test_vllms_own_gate_still_puts_its_replies_out_of_step(engine_of_two):
    engine = engine_of_two
    trainer = engine.trainer()
    trainer.call("connect")
    engine.assert_in_step()
    engine.rpc("wt_close_gate")
    with pytest.raises(Exception, match="finish_weight_update called without"):
        engine.llm.finish_weight_update()
    with pytest.raises(Exception, match="finish_weight_update called without"):
        engine.rpc("wt_echo", "nonce")  # and is given the reply to the call before it
    # Where this does not raise any more, vLLM stays in step by itself and bridge/gate.py can go.
