"""The article's code for vLLM's ``nccl`` backend, with other imports, on real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_calls import HOST, Native, free_port
from native_trainers import NativeTrainer
from trainers import in_background, wait_for

from vllm_wt.errors import (
    Aborted,
    InvalidInfo,
    LoadError,
    ManifestMismatch,
    PeerDead,
    Timeout,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.native import WorkerContext
from vllm_wt_nccl import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("nccl")]

SMALL = {"packed_buffer_size_bytes": 64 << 10}
"""Several parcels."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[NativeTrainer]]]:
    """A folder, and the trainers that live."""
    trainers: list[NativeTrainer] = []
    yield tmp_path_factory.mktemp("native"), trainers
    for trainer in trainers:
        trainer.close()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def native(request: pytest.FixtureRequest, engines: Any, shared: Any) -> Iterator[Native]:
    engine = engines.get("nccl", request.param)
    made = Native(engine, *shared)
    yield made
    made.close()
    engine.close_trainers()


@pytest.fixture
def untouched(native: Native) -> Iterator[None]:
    """The test leaves the weights that the engine had; the engine goes on with another trainer."""
    tokens, checksums = native.engine.tokens(), native.engine.checksums()
    yield
    native.engine.assert_in_step()
    assert (native.engine.tokens(), native.engine.checksums()) == (tokens, checksums)
    native.assert_works(99)


@pytest.mark.parametrize(
    ("number", "how"),
    list(enumerate(({"packed": True}, {"packed": True} | SMALL, {"packed": False}))),
    ids=["packed", "several-parcels", "one-by-one"],
)
def test_rounds_generate_what_transformers_generates(native, number, how):
    native.connect()
    seen = [native.engine.tokens()]
    for seed in (100 + number, 200 + number):
        checkpoint = native.trainer.call("randomize", seed)
        native.push(**how)
        tokens = native.engine.tokens()
        assert tokens == native.engine.reference(checkpoint)
        assert tokens not in seen
        seen.append(tokens)
        native.engine.assert_in_step()


def test_in_chunks(native):
    native.connect()
    checkpoint = native.trainer.call("randomize", 11)
    names = [name for name, _, _ in native.rows]
    native.engine.call("start_weight_update")
    for part in range(3):
        native.begin_send(names[part::3], packed=part != 1)
        native.update(names[part::3], packed=part != 1)
        native.trainer.answer()
    native.engine.call("finish_weight_update")
    assert native.engine.tokens() == native.engine.reference(checkpoint)


def test_the_engine_may_come_first(native):
    port = free_port()
    coming = in_background(lambda: native.init_engine(port))
    native.begin_trainer(port)
    native.trainer.answer()
    coming.result(60)
    checkpoint = native.trainer.call("randomize", 15)
    native.push(packed=True)
    assert native.engine.tokens() == native.engine.reference(checkpoint)


def test_beside_the_workers_of_another_engine(native):
    """Of which there is the backend's own class only, in a process of the test: ranks behind."""
    size = 2 + native.engine.tp
    port = free_port()
    context = WorkerContext(backend="nccl", device=torch.device("cpu"), rank=0, size=1)
    other = NCCLWeightTransferEngine(context)
    info = NCCLWeightTransferInitInfo(HOST, port, 1 + native.engine.tp, size)
    native.begin_trainer(port, size)
    coming = in_background(lambda: other.init_transfer_engine(info))
    native.init_engine(port, world_size=size)
    native.trainer.answer()
    coming.result(60)
    checkpoint = native.trainer.call("randomize", 20)
    came: dict[str, torch.Tensor] = {}
    update = NCCLWeightTransferUpdateInfo(*map(list, zip(*native.rows, strict=True)), packed=True)
    receiving = in_background(
        lambda: other.receive_weights(
            update, lambda weights: came.update((name, each.clone()) for name, each in weights)
        )
    )
    native.push(packed=True)
    receiving.result(60)
    assert native.engine.tokens() == native.engine.reference(checkpoint)
    assert list(came) == [name for name, _, _ in native.rows]
    other.shutdown()


def test_both_forms_on_one_engine(native):
    native.connect()
    trainer = native.engine.trainer()
    trainer.call("connect", 60.0, None, {}, False, "nccl", [])
    checkpoint = trainer.call("randomize", 30)
    trainer.call("push", 1)
    assert native.engine.tokens() == native.engine.reference(checkpoint)
    native.assert_works(31)


# -- what does not fit -----------------------------------------------------------------------------


def test_numbers_that_do_not_fit_are_refused_on_both_sides(native, untouched):
    tp = native.engine.tp
    for changes, match in (
        ({"world_size": 2 + tp}, f"{1 + tp}, which the trainer has"),
        ({"rank_offset": 0}, "the trainer is rank 0"),
        ({"rank_offset": 2}, f"ranks 2 to {1 + tp} of an engine with {tp} workers"),
    ):
        port = free_port()
        native.begin_trainer(port)
        with pytest.raises(InvalidInfo, match=match):
            native.init_engine(port, **changes)
        with pytest.raises(InvalidInfo, match=match):
            native.trainer.answer()


def test_a_trainer_that_never_comes(native, untouched):
    with pytest.raises(Timeout, match="has not come to where"):
        native.init_engine(free_port(), deadline_s=1.0)
    with pytest.raises(WrongOrder, match="before init_weight_transfer_engine"):
        native.engine.call("start_weight_update")


def test_other_tensors_than_announced(native, untouched):
    native.connect()
    native.begin_send(packed=True)
    native.engine.call("start_weight_update")
    with pytest.raises(ManifestMismatch, match="other tensors than update_info says"):
        native.update([name for name, _, _ in native.rows[:-1]], packed=True)
    with pytest.raises(ManifestMismatch, match="other tensors than update_info says"):
        native.trainer.answer()


def test_an_update_info_that_is_none(native):
    """The trainer, which waits for the workers, hears of it; the group goes on."""
    native.connect()
    before = native.engine.checksums()
    wrongs = (({"dtype_names": ["float31"]}, ManifestMismatch), ({"no_such_field": 1}, InvalidInfo))
    for number, (wrong, error) in enumerate(wrongs, 1):
        native.begin_send(packed=True)
        native.wait_for_round(number)
        native.engine.call("start_weight_update")
        with pytest.raises(error):
            native.update(native.rows[0][0:1], packed=True, **wrong)
        with pytest.raises((error, Aborted), match=next(iter(wrong))[:5]):
            native.trainer.answer()
    assert native.engine.checksums() == before
    checkpoint = native.trainer.call("randomize", 45)
    native.push(packed=True)
    assert native.engine.tokens() == native.engine.reference(checkpoint)


def test_a_tensor_that_is_missing(native):
    """The engine refuses to finish; the wire is as it was."""
    native.connect()
    before = native.engine.checksums()
    names = [name for name, _, _ in native.rows[:-1]]
    native.begin_send(names, packed=True)
    native.engine.call("start_weight_update")
    native.update(names, packed=True)
    native.trainer.answer()
    with pytest.raises(LoadError, match="would keep their old values"):
        native.engine.call("finish_weight_update")
    assert native.engine.checksums() == before
    checkpoint = native.trainer.call("randomize", 40)
    native.push(packed=True)
    assert native.engine.tokens() == native.engine.reference(checkpoint)


# -- what ends in the middle -----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_trainer_that_ends_in_mid_round(native, untouched, tmp_path, end):
    native.connect()
    flag = tmp_path / "held"
    native.trainer.call("randomize", 50)
    native.trainer.call("hold", 1, str(flag))
    native.begin_send(packed=True, **SMALL)
    native.engine.call("start_weight_update")
    updating = in_background(lambda: native.update(packed=True, deadline_s=5.0, **SMALL))
    wait_for(flag.exists)
    native.lose_trainer(end)
    with pytest.raises(PeerDead if end == "kill" else Timeout):
        updating.result(60)
    with pytest.raises(WrongOrder):
        native.engine.call("finish_weight_update")


def test_an_engine_that_connects_to_another_trainer(native):
    """The first one hears of it when it sends."""
    native.connect()
    with pytest.raises(Timeout):
        native.init_engine(free_port(), deadline_s=1.0)
    native.begin_send(packed=True)
    with pytest.raises(WeightTransferError, match="has left the group"):
        native.trainer.answer()
