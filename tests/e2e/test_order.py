"""Calls out of order, made straight at vLLM: refused with a typed error, on one rank and on two.

vLLM's own gate would refuse them on every rank, and its replies would be out of step ever after.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_wt import WeightSync
from vllm_wt.errors import Aborted, InvalidInfo, WrongOrder, from_text
from vllm_wt.serving import serving
from vllm_wt.testing.models import random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


_changes = itertools.count(1)


@pytest.fixture
def sync(engine):
    """A session, and the call of vLLM's methods with its info at hand."""
    model = random_model(engine.shape, seed=60)
    with WeightSync.connect(engine.llm, backend="rdma", source=model) as sync:
        yield sync


def _refused(engine, error_cls, call, *args):
    """The typed error of a call to the LLM itself, after which all is as before."""
    digests = engine.checksums()
    with pytest.raises(Exception, match="WT-E") as raised:
        getattr(engine.llm, call)(*args)
    error = from_text(str(raised.value), where=call)
    assert type(error) is error_cls
    assert error.backend == "rdma"
    assert error.cure
    if engine.tp > 1:
        assert sorted(error.ranks) == list(range(engine.tp))
    engine.assert_in_step()
    assert engine.checksums() == digests
    return error


def _commits(engine, sync, version):
    before = engine.checksums()
    with torch.no_grad():
        for param in sync._trainer.source._module.parameters():
            param.mul_(1 + 0.01 * next(_changes))
    sync.push(version)
    assert engine.checksums() != before
    engine.assert_in_step()


def test_start_twice(engine, sync):
    engine.llm.start_weight_update()
    error = _refused(engine, WrongOrder, "start_weight_update")
    assert error.what == "Cannot start a round in state 'started'"
    _commits(engine, sync, 1)


def test_finish_without_start(engine, sync):
    error = _refused(engine, WrongOrder, "finish_weight_update")
    assert error.what == "Cannot finish in state 'idle'"
    _commits(engine, sync, 1)


def test_finish_twice(engine, sync):
    sync.push(1)
    _refused(engine, WrongOrder, "finish_weight_update")
    _commits(engine, sync, 2)


def test_finish_without_update(engine, sync):
    engine.llm.start_weight_update()
    error = _refused(engine, Aborted, "finish_weight_update")
    assert error.expected == "state 'sealed'"
    _commits(engine, sync, 1)


def test_update_without_start(engine, sync):
    info = sync._members.links[0]._info("open", _deadline()).to_wire()
    error = _refused(engine, WrongOrder, "update_weights", {"update_info": info})
    assert error.what == "Cannot open a transfer in state 'idle'"
    _commits(engine, sync, 1)


def test_a_list_for_fewer_ranks_than_there_are(engine, sync):
    """vLLM 0.29 and later picks an entry by rank, and would fail on some ranks alone."""
    engine.llm.start_weight_update()
    info = sync._members.links[0]._info("open", _deadline()).to_wire()
    error = _refused(engine, InvalidInfo, "update_weights", {"update_info": [info]})
    assert "must be a mapping" in error.what
    _commits(engine, sync, 1)


def test_a_draft_update(engine, sync):
    with pytest.raises(Exception, match="WT-E") as raised:
        engine.rpc("start_draft_weight_update")
    error = from_text(str(raised.value), where="draft")
    assert type(error) is WrongOrder
    assert "draft models are not supported" in error.cure
    engine.assert_in_step()
    _commits(engine, sync, 1)


def test_releasing_the_trainer_in_the_middle_of_a_round(engine, sync):
    engine.llm.start_weight_update()
    engine.rpc("shutdown_weight_transfer_engine")  # vLLM 0.32's
    error = _refused(engine, WrongOrder, "start_weight_update")
    assert error.what == "start_weight_update before init_weight_transfer_engine"
    with WeightSync.connect(engine.llm, backend="rdma", source=sync._trainer.source) as again:
        _commits(engine, again, 1)


def test_init_twice(engine, sync):
    _commits(engine, sync, 1)
    with serving(sync._trainer):
        engine.init(sync._trainer.describe(_deadline()).to_wire())
    assert sync.status()[0].version == 1
    _commits(engine, sync, 2)


def _deadline():
    from vllm_wt.deadline import Deadline

    return Deadline(30)
