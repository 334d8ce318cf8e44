"""Where an update is received: all of it first, on the device or on the host, or a part at a time."""

from __future__ import annotations

import pytest

from vllm_wt.errors import NotPaused, TransportError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MIB = 1 << 20


@pytest.fixture
def parts(engine):
    """Streamed updates come in several batches."""
    engine.rpc("wt_streamed_nbytes", MIB // 16)
    yield
    engine.rpc("wt_streamed_nbytes", 256 * MIB)


def digests_after_a_clean_push(engine, seed):
    trainer = engine.trainer()
    trainer.call("connect")
    checkpoint = trainer.call("randomize", seed)
    trainer.call("push", 1)
    assert engine.tokens() == engine.reference(checkpoint)
    trainer.close()
    return engine.rpc("wt_digests"), engine.rpc("wt_staging")


def test_a_streamed_update_is_the_same_in_less_memory(engine, parts):
    new, staged = digests_after_a_clean_push(engine, 410)
    trainer = engine.trainer()
    trainer.call("connect", 60.0, None, {"staging": "none"}, True)
    trainer.call("randomize", 411)
    trainer.call("push", 1)
    assert engine.rpc("wt_digests") != new
    trainer.call("randomize", 410)
    trainer.call("push", 2)
    assert engine.rpc("wt_digests") == new
    assert not trainer.call("torn")
    for before, now in zip(staged, engine.rpc("wt_staging"), strict=True):
        assert (before["staging"], len(before["batches"])) == ("device", 1)
        assert (now["staging"], now["why"]) == ("none", "asked for")
        assert len(now["batches"]) > 2
        assert sum(now["batches"]) == sum(before["batches"])
    engine.assert_in_step()


def test_a_streamed_update_that_fails_is_torn_until_a_full_one(engine, parts):
    trainer = engine.trainer()
    trainer.call("connect", 60.0, None, {"staging": "none"}, True)
    checkpoint = trainer.call("randomize", 420)
    trainer.call("push", 1)
    whole = engine.rpc("wt_digests")
    trainer.call("randomize", 421)
    for rank in range(engine.tp):
        engine.rpc("wt_fail_batch_once", 2, rank)
        with pytest.raises(TransportError, match="injected into a batch"):
            trainer.call("push", 2)
        assert trainer.call("torn")
        engine.assert_in_step()
        assert engine.rpc("wt_digests") != whole
        assert [state["meta"] for state in engine.state()] == [[]] * engine.tp
    checkpoint = trainer.call("randomize", 422)
    trainer.call("push", 2)
    assert not trainer.call("torn")
    assert engine.tokens() == engine.reference(checkpoint)
    engine.assert_in_step()


def test_an_engine_that_may_generate_is_not_streamed_into(engine, parts):
    digests = engine.rpc("wt_digests")
    trainer = engine.trainer()
    trainer.call("connect", 60.0, None, {"staging": "none"})
    trainer.call("randomize", 430)
    with pytest.raises(NotPaused) as error:
        trainer.call("push", 1)
    assert "staging" in error.value.cure
    assert not trainer.call("torn")
    engine.assert_in_step()
    assert engine.rpc("wt_digests") == digests


@pytest.mark.parametrize("options", [{"staging": "host"}, {"verify": "bytes"}, {"verify": "off"}])
def test_other_ways(engine, options):
    trainer = engine.trainer()
    trainer.call("connect", 60.0, None, options)
    for version in (1, 2):
        checkpoint = trainer.call("randomize", 440 + version)
        trainer.call("push", version)
    assert engine.tokens() == engine.reference(checkpoint)
