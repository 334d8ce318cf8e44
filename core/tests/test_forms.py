"""A backend of two forms takes each trainer in the form that its data is of."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_wt import registry
from vllm_wt.engine import WeightTransferEngine, WorkerContext
from vllm_wt.errors import InvalidInfo, TornModel, WrongOrder
from vllm_wt.forms import Forms
from vllm_wt.info import InitInfo, UpdateInfo
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.native_round import NativeRound
from vllm_wt.ranks import SingleRank
from vllm_wt.registry import Backend, Registry
from vllm_wt.round import WorkerRound
from vllm_wt.spec import BackendSpec, Kind

from .support.native_engine import SIZES, MyEngine, MyModel, holds

MANIFEST = Manifest(tuple(TensorMeta(name, "float32", (size,)) for name, size in SIZES.items()))
SESSION = InitInfo(
    session="s1", tensors=InitInfo.tensors_of(MANIFEST), manifest_digest=MANIFEST.digest
).to_wire()
NATIVE = {"scale": 1.0}


class SessionEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.calls: list[str] = []

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.calls.append("init")

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any) -> None:
        load_weights([(name, torch.full((size,), 7.0)) for name, size in SIZES.items()])

    def abort_weight_update(self, reason: str) -> None:
        return None

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def made(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> tuple[Forms, MyModel]:
    found = Registry()
    found.add(Backend(BackendSpec(name="mine", **spec), "dist-mine", "1.0"))
    monkeypatch.setattr(registry, "default", lambda: found)
    engines = SimpleNamespace(Session=SessionEngine, Native=lambda context: MyEngine())
    monkeypatch.setitem(sys.modules, "t_mine", engines)
    context = WorkerContext(backend="mine", device=torch.device("cpu"), rank=0, size=1)
    model = MyModel()
    return Forms(context, model, SingleRank()), model


@pytest.fixture
def both(monkeypatch):
    return made(
        monkeypatch,
        kind=Kind.ENGINE,
        worker="t_mine:Session",
        trainer="t_mine:Trainer",
        native="t_mine:Native",
    )


def push_native(forms: Forms, number: float) -> None:
    forms.current.start()
    forms.current.update({"names": list(SIZES), "value": number})
    forms.current.finish()


def push_session(forms: Forms, version: int) -> None:
    update = UpdateInfo(
        op="all", session="s1", version=version, ticket=version, manifest_digest=MANIFEST.digest
    )
    forms.current.start()
    forms.current.update(update.to_wire())
    forms.current.finish()


def test_each_trainer_is_taken_in_its_form(both):
    forms, model = both
    assert isinstance(forms.current, WorkerRound)
    session = forms.current._engine
    forms.init(SESSION)
    push_session(forms, 1)
    assert model.weights == holds(7.0)
    forms.init(NATIVE)
    assert isinstance(forms.current, NativeRound)
    assert session.calls == ["init", "shutdown"]
    native = forms.current._engine
    push_native(forms, 2.0)
    assert model.weights == holds(2.0)
    forms.init(SESSION)
    assert isinstance(forms.current, WorkerRound)
    assert native.calls[-1] == "shutdown"
    push_session(forms, 1)  # it is a new session: its versions begin anew
    assert model.weights == holds(7.0)
    forms.init(NATIVE)
    push_native(forms, 3.0)  # by a plan of its own, though the tensors are the same
    assert model.weights == holds(3.0)
    assert len(model.used) == 4


def test_a_trainer_of_the_form_that_was_left_starts_nothing(both):
    forms, _ = both
    forms.init(SESSION)
    session = forms.current
    forms.init(NATIVE)
    with pytest.raises(WrongOrder, match="before init"):
        session.start()


def test_a_torn_model_is_torn_in_either_form(both):
    forms, model = both
    forms.init(NATIVE)
    model.fail = "bad layer"
    with pytest.raises(TornModel):
        push_native(forms, 1.0)
    model.fail = None
    forms.init(SESSION)
    assert forms.current.torn
    push_session(forms, 1)
    forms.init(NATIVE)
    assert not forms.current.torn


@pytest.mark.parametrize("data", [None, [SESSION]])
def test_what_is_of_no_form_is_refused_by_the_one_in_use(both, data):
    forms, _ = both
    forms.init(NATIVE)
    with pytest.raises(InvalidInfo, match="must be a mapping"):
        forms.init(data)
    push_native(forms, 1.0)


@pytest.mark.parametrize(
    ("spec", "form", "data", "other"),
    [
        ({"kind": Kind.NATIVE, "native": "t_mine:Native"}, NativeRound, NATIVE, SESSION),
        (
            {"kind": Kind.ENGINE, "worker": "t_mine:Session", "trainer": "t_mine:Trainer"},
            WorkerRound,
            SESSION,
            NATIVE,
        ),
    ],
    ids=["native", "session"],
)
def test_a_backend_of_one_form_takes_all_as_that(monkeypatch, spec, form, data, other):
    forms, _ = made(monkeypatch, **spec)
    assert isinstance(forms.current, form)
    forms.init(data)
    with pytest.raises(InvalidInfo):
        forms.init(other)
    assert isinstance(forms.current, form)
    forms.current.start()
