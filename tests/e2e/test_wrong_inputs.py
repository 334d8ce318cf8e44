"""What a trainer can send wrong: each a typed error, the engine as before, the next round good.

On engines at TP 1 and TP 2, in this process and over HTTP. The trainer's own side, which refuses most
mistakes before an engine hears of them, is in core's test_session.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
import torch

from vllm_wt import WeightSync
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    LoadError,
    ManifestMismatch,
    OutOfBounds,
    Revoked,
    Superseded,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.info import Handle
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.serving import serving
from vllm_wt.source import PairsSource
from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

INIT, START, UPDATE, FINISH = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class Trainer:
    """A right session, and the infos it would send, to be spoiled."""

    def __init__(self, host: Any, folder: Any) -> None:
        self._host = host
        self._folder = folder
        self._seed = 700
        self.model = random_model(host.shape, seed=self._seed)
        self.sync = WeightSync.connect(host.target, backend="rdma", source=self.model)
        self._link = self.sync._members.links[0]
        self.version = 0

    def init_info(self) -> dict[str, Any]:
        return self.sync._trainer.describe(Deadline(30)).to_wire()

    def update_info(self, op: str, version: int = 1) -> dict[str, Any]:
        self.sync._trainer.publish(version, Deadline(30))
        return self._link._info(op, Deadline(30)).to_wire()

    def handle(self, **changes: Any) -> dict[str, Any]:
        """The right handle with wrong content, and a checksum that holds."""
        handle = Handle.from_wire(self.init_info()["handle"], backend="rdma")
        fields = json.loads(handle.unwrap(backend="rdma")) | changes
        body = json.dumps(fields).encode()
        return Handle.wrap(handle.owner, handle.generation, body).to_wire()

    def good_round(self) -> None:
        self._seed += 1
        self.version += 1
        randomize(self.model, self._seed)
        self.sync.push(self.version)
        save_checkpoint(self.model, self._folder / str(self._seed))
        assert self._host.tokens() == self._host.reference(self._folder / str(self._seed))


@pytest.fixture
def trainer(host, tmp_path):
    trainer = Trainer(host, tmp_path)
    yield trainer
    trainer.sync.close()


def _refused(host, error_cls, call, *args) -> WeightTransferError:
    """The error of one call made straight at vLLM, which changes nothing."""
    digests = host.checksums()
    with pytest.raises(error_cls) as raised:
        host.call(call, *args)
    host.assert_in_step()
    assert host.checksums() == digests
    error = raised.value
    assert error.backend == "rdma"
    assert error.where
    assert error.cure
    if host.tp > 1 and error_cls is not Superseded:
        assert set(error.ranks) <= set(range(host.tp))
    return error


def _without(info: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name != field}


WRONG_INIT = {
    "unknown field": (lambda i: i | {"port": 3}, "port", "only session, tensors", "port"),
    "missing field": (lambda i: _without(i, "session"), "session", "all of session", "none"),
    "wrong type": (lambda i: i | {"session": 3}, "session", "valid string", "3"),
    "wrong form": (lambda i: i | {"session": "a b"}, "session", "match pattern", "'a b'"),
    "no time": (lambda i: i | {"deadline_s": 0}, "deadline_s", "greater than 0", "0"),
    "too much": (lambda i: i | {"deadline_s": 86401}, "deadline_s", "equal to 86400", "86401"),
    "as text": (lambda i: i | {"deadline_s": "60"}, "deadline_s", "valid number", "'60'"),
    "protocol": (lambda i: i | {"protocol": 2}, "protocol", "should be 1", "2"),
    "tensors": (lambda i: i | {"tensors": "all"}, "tensors", "valid array", "'all'"),
    "no handle": (lambda i: i | {"handle": None}, "handle", "object", "None"),
}


def test_init_info(host, trainer):
    for mistake, (spoil, where, expected, got) in WRONG_INIT.items():
        error = _refused(host, InvalidInfo, INIT, spoil(trainer.init_info()))
        assert error.where == where, mistake
        assert expected in error.expected, mistake
        assert got in error.got, mistake
    trainer.good_round()


WRONG_UPDATE = {
    "unknown field": (lambda i: i | {"rank": 3}, "rank", "only op, session, version", "rank"),
    "missing field": (lambda i: _without(i, "ticket"), "ticket", "all of op, session", "none"),
    "unknown op": (lambda i: i | {"op": "load"}, "op", "'open', 'poll'", "'load'"),
    "as text": (lambda i: i | {"version": "1"}, "version", "valid integer", "'1'"),
    "fraction": (lambda i: i | {"version": 1.5}, "version", "valid integer", "1.5"),
    "below": (lambda i: i | {"version": -1}, "version", "greater than or equal to 0", "-1"),
    "above": (lambda i: i | {"version": 2**63}, "version", "less than or equal to", str(2**63)),
    "no time": (lambda i: i | {"deadline_s": -1}, "deadline_s", "greater than 0", "-1"),
    "handle": (lambda i: i | {"handle": 3}, "handle", "object", "3"),
}


def test_update_info(host, trainer):
    for mistake, (spoil, where, expected, got) in WRONG_UPDATE.items():
        host.call(START)
        error = _refused(host, InvalidInfo, UPDATE, spoil(trainer.update_info("open")))
        assert error.where.split(".")[0] == where, mistake
        assert expected in error.expected, mistake
        assert got in error.got, mistake
    trainer.good_round()


def test_manifest_that_disagrees_with_its_digest(host, trainer):
    info = trainer.init_info()
    info["tensors"] = info["tensors"][::-1]
    error = _refused(host, CorruptTransfer, INIT, info)
    assert "disagrees with its digest" in error.what
    trainer.good_round()


def test_manifest_that_makes_no_sense(host, trainer):
    for spoil, said in [
        (lambda tensors: tensors.append(tensors[0]), "occurs twice"),
        (lambda tensors: tensors.clear(), "no tensors"),
        (lambda tensors: tensors[0].update(dtype="float31"), "float31"),
        (lambda tensors: tensors[0].update(shape=[2**60]), "impossible"),
    ]:
        info = trainer.init_info()
        spoil(info["tensors"])
        assert said in str(_refused(host, ManifestMismatch, INIT, info))
    trainer.good_round()


def test_source_that_does_not_fit_the_model(host, trainer):
    for change, said in [
        (lambda s: s.pop("model.norm.weight"), "model.norm.weight"),
        (lambda s: s.update({"model.layers.9.x": torch.ones(2)}), "does not take these weights"),
        (lambda s: s.update({"model.norm.weight": torch.ones(3)}), "does not take these weights"),
    ]:
        state = dict(trainer.model.named_parameters())
        change(state)
        digests = host.checksums()
        with pytest.raises(LoadError) as error:
            WeightSync.connect(host.target, backend="rdma", source=state)
        assert said in str(error.value)
        assert error.value.backend == "rdma"
        assert error.value.cure
        host.assert_in_step()
        assert host.checksums() == digests
    trainer.good_round()  # the session that was there is still there


def test_sources_that_the_trainer_refuses_by_itself(host, trainer):
    pairs = list(trainer.model.named_parameters())
    for source, said in [(PairsSource(pairs + pairs[:1]), "occurs twice"), ({}, "no tensors")]:
        with pytest.raises(ManifestMismatch, match=said):
            WeightSync.connect(host.target, backend="rdma", source=source)
    trainer.good_round()


def test_nan_is_legal(host, trainer):
    with torch.no_grad():
        trainer.model.get_parameter("model.norm.weight").fill_(math.nan)
    digests = host.checksums()
    trainer.version += 1
    trainer.sync.push(trainer.version)
    host.assert_in_step()
    assert host.checksums() != digests
    trainer.good_round()


def test_version_that_goes_back(host, trainer):
    trainer.version = 5
    trainer.good_round()
    host.call(START)
    error = _refused(host, InvalidInfo, UPDATE, trainer.update_info("open", version=6))
    assert (error.where, error.expected, error.got) == ("version", "more than 6", "6")
    trainer.good_round()


def test_a_digest_of_another_manifest(host, trainer):
    host.call(START)
    other = Manifest((TensorMeta("a", "float32", (2,)),)).digest
    info = trainer.update_info("open") | {"manifest_digest": other}
    error = _refused(host, ManifestMismatch, UPDATE, info)
    assert "not what was agreed on" in error.what
    assert error.got == other
    trainer.good_round()


def test_calls_of_another_session(host, trainer):
    info = trainer.update_info("seal") | {"session": "somebody"}
    error = _refused(host, Superseded, UPDATE, info)
    assert error.got == "somebody"
    trainer.good_round()


@pytest.mark.parametrize(
    ("calls", "error_cls", "said"),
    [
        ([START, START], WrongOrder, "start a round in state 'started'"),
        ([FINISH], WrongOrder, "finish in state 'idle'"),
        ([START, FINISH], Aborted, "before it was sealed"),
    ],
    ids=["start twice", "finish without start", "finish without update"],
)
def test_order(host, trainer, calls, error_cls, said):
    *before, last = calls
    for call in before:
        host.call(call)
    assert said in _refused(host, error_cls, last).what
    trainer.good_round()


@pytest.mark.parametrize(
    ("spoil", "error_cls", "said"),
    [
        (
            lambda t: t.init_info()["handle"] | {"body": "AAAA"},
            CorruptTransfer,
            "damaged on its way",
        ),
        (
            lambda t: t.init_info()["handle"] | {"owner": "me"},
            CorruptTransfer,
            "damaged on its way",
        ),
        (
            lambda t: t.handle(metadata=base64.b64encode(b"garbage" * 50).decode()),
            WeightTransferError,
            "",
        ),
        (lambda t: t.handle(agent="other"), InvalidInfo, "'agent'"),
        (lambda t: t.handle(nonce=5), Revoked, "expose this memory any more"),
        (lambda t: t.handle(buffers=[]), OutOfBounds, "leaves the"),
    ],
    ids=["cut", "of another owner", "garbage metadata", "agent", "revoked", "nothing exposed"],
)
def test_handle(host, trainer, spoil, error_cls, said):
    info = trainer.init_info() | {
        "session": "garbage",
        "takes_over": True,
        "handle": spoil(trainer),
        "deadline_s": 5.0,
    }
    digests = host.checksums()
    with serving(trainer.sync._trainer), pytest.raises(error_cls) as error:
        host.call(INIT, info)
    assert said in str(error.value)
    assert error.value.backend == "rdma"
    host.assert_in_step()
    assert host.checksums() == digests
    with pytest.raises(WrongOrder, match="before init"):
        trainer.sync.push(1)  # the first connection has ended where the second was tried
    with WeightSync.connect(host.target, backend="rdma", source=trainer.model) as again:
        again.push(1)
    host.assert_in_step()


def test_a_handle_outside_what_was_exposed(host, trainer):
    """Right in form, it reaches where the trainer has registered nothing."""
    fields = json.loads(
        Handle.from_wire(trainer.init_info()["handle"], backend="rdma").unwrap(backend="rdma")
    )
    buffers = [b | {"address": b["address"] + (1 << 40)} for b in fields["buffers"]]
    info = trainer.init_info() | {
        "session": "garbage",
        "takes_over": True,
        "handle": trainer.handle(buffers=buffers),
    }
    with serving(trainer.sync._trainer), pytest.raises(WeightTransferError) as error:
        host.call(INIT, info | {"deadline_s": 5.0})
    assert error.value.backend == "rdma"
    host.assert_in_step()
    with WeightSync.connect(host.target, backend="rdma", source=trainer.model) as again:
        again.push(1)
    host.assert_in_step()


def test_a_tensor_freed_or_resized_between_rounds(host, trainer):
    trainer.good_round()
    norm = trainer.model.get_parameter("model.norm.weight")
    kept = norm.detach().clone()
    norm.untyped_storage().resize_(0)
    digests = host.checksums()
    with pytest.raises(ManifestMismatch, match="has been freed or resized"):
        trainer.sync.push(50)
    assert host.checksums() == digests
    norm.data = kept
    trainer.version = 50
    trainer.good_round()
    trainer.model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ManifestMismatch, match=r"model\.norm\.weight"):
        trainer.sync.push(60)
    trainer.model.model.norm.weight = torch.nn.Parameter(kept)
    trainer.version = 60
    trainer.good_round()
