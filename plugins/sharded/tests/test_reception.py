"""What a trainer says of itself is checked before anything is read of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import (
    BackendUnavailable,
    CorruptTransfer,
    InvalidInfo,
    LoadError,
    ManifestMismatch,
)
from vllm_wt.loading.plan import Fallback, LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.source import StateDictSource
from vllm_wt.testing.conformance.package import Package
from vllm_wt_sharded.info import ShardedInitInfo, ShardedUpdateInfo
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.reception import reception
from vllm_wt_sharded.trainer import ShardedTrainer
from vllm_wt_sharded.worker import ShardedEngine

from .support.loads import copy_of

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0), "c": torch.ones(4)}


@pytest.fixture
def info():
    trainer = ShardedTrainer(StateDictSource(WEIGHTS), backend="sharded", over="ipc")
    yield trainer.describe(Deadline(30))
    trainer.shutdown()


@pytest.fixture
def engine():
    context = WorkerContext(backend="sharded", device=torch.device("cpu"), rank=0, size=1)
    engine = ShardedEngine(context)
    yield engine
    engine.shutdown()


def whole(info):
    return LoadPlan.of_whole(info.manifest(), "no model")


def nothing_of(info):
    """The plan of a worker that takes none of the tensors."""
    names = tuple(tensor.name for tensor in info.manifest().tensors)
    return replace(whole(info), fallbacks={}, unused=names)


def layout_without_rows(info):
    layout = Layout.of(Layout.from_wire(info.layout).tensors, [("c", 0, (0,), (3,))])
    return {"layout": layout.to_wire(), "layout_digest": layout.digest}


DAMAGED = {
    "no layout": (lambda info: {"layout": {}}, InvalidInfo),
    "half a layout": (lambda info: {"layout": {**info.layout, "rank": "AAAA"}}, InvalidInfo),
    "a field more": (lambda info: {"layout": {**info.layout, "colour": "red"}}, InvalidInfo),
    "no number": (lambda info: {"layout": {**info.layout, "dims": "2"}}, InvalidInfo),
    "digest": (lambda info: {"layout_digest": "0" * 64}, CorruptTransfer),
    "manifest": (lambda info: {"manifest_digest": "0" * 64}, CorruptTransfer),
    "no owners": (lambda info: {"owners": ()}, CorruptTransfer),
    "an owner more": (lambda info: {"owners": info.owners * 2}, CorruptTransfer),
    "not covered": (layout_without_rows, ManifestMismatch),
    "unknown": (lambda info: {"over": "nothing"}, BackendUnavailable),
    "no carrier": (lambda info: {"over": "nccl"}, InvalidInfo),
    "itself": (lambda info: {"over": "sharded"}, InvalidInfo),
    "its transport": (lambda info: {"transport": "none"}, InvalidInfo),
}


@pytest.mark.parametrize(("change", "error"), DAMAGED.values(), ids=DAMAGED)
def test_what_makes_no_sense_is_refused(engine, info, change, error):
    damaged = ShardedInitInfo.from_wire(
        json.loads(json.dumps(replace(info, **change(info)).to_wire())), backend="sharded"
    )
    with pytest.raises(error) as caught:
        engine.plan_receive(whole(info), damaged)
    assert type(caught.value) is error
    assert caught.value.cure
    assert caught.value.expected
    assert engine.plan_receive(whole(info), info).plan.manifest == info.manifest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("over", "No Such"),
        ("over", ""),
        ("over", None),
        ("layout", []),
        ("layout_digest", "0"),
        ("owners", [{}]),
        ("owners", None),
        ("verify", "sometimes"),
        ("staging", "elsewhere"),
        ("colour", "red"),
    ],
)
def test_what_is_no_init_info(info, field, value):
    with pytest.raises(InvalidInfo, match=field) as caught:
        ShardedInitInfo.from_wire({**info.to_wire(), field: value}, backend="sharded")
    assert caught.value.backend == "sharded"


@pytest.mark.parametrize(
    "field", ["over", "layout", "layout_digest", "owners", "session", "manifest_digest"]
)
def test_what_an_init_info_must_have(info, field):
    wire = info.to_wire()
    del wire[field]
    with pytest.raises(InvalidInfo, match=field):
        ShardedInitInfo.from_wire(wire, backend="sharded")


def test_an_update_of_another_number_of_ranks(engine, info):
    engine.plan_receive(nothing_of(info), info)  # so that nobody has to answer
    engine.init_transfer_engine(info)
    engine.start_weight_update()
    update = ShardedUpdateInfo(
        op="open",
        session=info.session,
        version=1,
        ticket=1,
        manifest_digest=info.manifest_digest,
        handles=(info.owners[0].handle,) * 2,
    )
    with pytest.raises(InvalidInfo, match="another number of ranks") as caught:
        engine.receive_weights(update, lambda weights: pytest.fail("nothing has come"))
    assert (caught.value.expected, caught.value.got) == ("1", "2")


def test_streaming_is_refused(engine, info):
    with pytest.raises(LoadError, match="receives everything before it is loaded") as caught:
        engine.plan_receive(whole(info), replace(info, staging="none"))
    assert "VLLM_WT_ARENA" in caught.value.cure


def planned(info, plan):
    return reception(plan, info, worker=0, gap=0, alignment=1, most=1000)


def test_a_worker_that_needs_nothing(info):
    """Nothing but what is empty is handed over."""
    found = planned(info, nothing_of(info))
    assert found.parts == ()
    assert [tensor.name for tensor in found.fulls] == ["b"]
    assert found.intake.plan.manifest == Manifest((TensorMeta("b", "float32", (0,)),))


def test_a_worker_that_needs_nothing_of_a_model_without_empty_tensors():
    """Something is handed over all the same: the least there is."""
    weights = {"a": torch.ones(3), "b": torch.ones(1), "c": torch.ones(2)}
    trainer = ShardedTrainer(StateDictSource(weights), backend="sharded", over="ipc")
    info = trainer.describe(Deadline(30))
    trainer.shutdown()
    found = planned(info, nothing_of(info))
    [part] = found.parts
    assert part.names == tuple(tensor.name for tensor in found.intake.plan.manifest.tensors)
    assert part.slices.nbytes == 4
    assert found.fulls == ()


def of_two(info, *rows):
    """The info of two ranks that hold these."""
    layout = Layout.of(Layout.from_wire(info.layout).tensors, rows)
    owners = info.owners * 2
    return replace(info, layout=layout.to_wire(), layout_digest=layout.digest, owners=owners)


def test_what_comes_where(info):
    """In whole blocks for each rank; then the full tensors that are put together of several pieces, and
    not those that are one."""
    two = of_two(info, ("a", 0, (0, 0), (2, 1)), ("a", 1, (0, 1), (2, 2)), ("c", 1, (0,), (4,)))
    found = planned(two, whole(info))
    assert [part.rank for part in found.parts] == [0, 1]
    assert [part.nbytes for part in found.parts] == [4096, 8192]
    places = found.places(torch.zeros(found.nbytes, dtype=torch.uint8))
    assert [each.numel() for each in places.parts] == [4096, 8192]
    assert {name: tuple(full.shape) for name, full in places.fulls.items()} == {
        "a": (2, 3),
        "b": (0,),
    }
    assert list(found.alone) == ["c"]
    assert found.intake.plan.manifest.tensors == info.manifest().tensors
    starts = [each.data_ptr() for each in (*places.parts, places.fulls["a"])]
    assert starts == [starts[0], starts[0] + 4096, starts[0] + 4096 + 8192]


def test_other_modules_read_what_a_fallback_needs_from_the_full_tensor(info):
    """`Intake.plan` has a source for every copy."""
    view = torch.empty(2, 3)[:, 1:]
    plan = LoadPlan(
        info.manifest(),
        (copy_of(view, torch.empty(2, 2), source="a"),),
        (),
        {},
        {"f": Fallback("f", ("why",), ("a",))},
        ("c",),
    )
    found = planned(info, plan).intake.plan
    assert [copy.source for copy in found.copies] == ["a"]
    assert found.source("a").shape == (2, 3)


def test_an_engine_maps_nothing_of_an_owner():
    """The conformance kit asks every backend."""
    assert Package("sharded").maps() is False
