"""A worker that is killed takes its vLLM with it: a typed error names the engine, others go on, and get
the next version without it."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest
from servers import http_engine

from vllm_wt import WeightSync
from vllm_wt.errors import EngineError, PeerDead, TransportError
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def _one_dies(dying, other, tmp_path):
    model = random_model(other.shape, seed=900)
    with WeightSync.connect([dying.target, other.target], backend="rdma", source=model) as sync:
        sync.push(1)
        pid = int(dying.rpc("wt_resources")[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        # vLLM may be in the middle of noticing: then the first error has its words, or is that of the
        # ranks that are left, and is no less typed.
        with pytest.raises((PeerDead, EngineError, TransportError)) as error:
            sync.push(2)
        assert error.value.where
        assert error.value.cure
        assert "engine0" in str(error.value)
        first, second = sync.status()
        assert first.error is not None
        assert (second.version, second.error) == (1, None)
        randomize(model, seed=902)
        result = sync.push(3, on_failure="exclude")
        assert (list(result.failed), list(result.engines)) == (["engine0"], ["engine1"])
        save_checkpoint(model, tmp_path / "without")
        assert other.tokens() == other.reference(tmp_path / "without")
    randomize(model, seed=901)
    with WeightSync.connect(other.target, backend="rdma", source=model) as sync:
        sync.push(1)
    save_checkpoint(model, tmp_path / "after")
    assert other.tokens() == other.reference(tmp_path / "after")
    other.assert_in_step()


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_of_an_llm(make_engine, engines, tmp_path, tp):
    with contextmanager(make_engine)(ModelShape(vocab=500), tp=tp) as dying:
        _one_dies(dying, engines.get("llm", 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_worker_of_a_server(engines, tmp_path, tp):
    with http_engine(tmp_path, ModelShape(vocab=500), tp) as dying:
        _one_dies(dying, engines.get("http", 1), tmp_path)
