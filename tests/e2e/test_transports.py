"""By which of a backend's transports an engine reads is its trainer's choice at each connect."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")
def test_an_engine_reads_by_ucx_and_then_by_nixl(engine):
    for transport, fabric in (("ucx", "UcxTransport"), ("nixl", "NixlTransport")):
        trainer = engine.trainer()
        trainer.call("connect", 60.0, None, {"transport": transport})
        for version in (1, 2):
            checkpoint = trainer.call("randomize", version)
            trainer.call("push", version)
            assert engine.tokens() == engine.reference(checkpoint)
            assert engine.rpc("wt_fabric") == [fabric] * engine.tp
        engine.assert_in_step()
        engine.close_trainers()
