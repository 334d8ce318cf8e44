"""Fifty rounds of a 100 MB model: no new registration, the arena stays, memory is flat."""

from __future__ import annotations

import pytest

from vllm_wt.testing.models import ModelShape

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 50
SETTLE = 5
SLACK = 16 << 20
"""Bytes that an allocator may keep back; one leaked copy of the model a round would be 5 GB."""


@pytest.fixture
def large_engine(make_engine):
    yield from make_engine(ModelShape(hidden=512, layers=8, vocab=8192), tp=1)


def test_fifty_rounds(large_engine):
    engine = large_engine
    trainer = engine.trainer()
    trainer.call("connect")
    for version in range(1, ROUNDS + 1):
        checkpoint = trainer.call("randomize", version, version == ROUNDS)
        result = trainer.call("push", version)
        if version == SETTLE:
            worker, rss = engine.rpc("wt_memory"), trainer.call("resources")["rss"]
            generation = trainer.call("registrations")
    assert result["nbytes"] > 100e6
    for before, after in zip(worker, engine.rpc("wt_memory"), strict=True):
        assert after["rss"] < before["rss"] + SLACK
        for key in ("arena", "transport", "threads"):
            assert after[key] == before[key], key
    assert trainer.call("resources")["rss"] < rss + SLACK
    assert trainer.call("registrations") == generation
    assert engine.tokens() == engine.reference(checkpoint)
