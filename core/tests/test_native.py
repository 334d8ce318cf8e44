"""Rounds of an engine in vLLM's own form: what each failure leaves behind, on one rank and on two."""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_wt import registry
from vllm_wt.backends import trainer_engine
from vllm_wt.errors import (
    Aborted,
    InvalidInfo,
    LoadError,
    ManifestMismatch,
    PluginError,
    Timeout,
    TornModel,
    TransportError,
    WrongOrder,
)
from vllm_wt.native import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WorkerContext,
)
from vllm_wt.native_round import NativeRound
from vllm_wt.ranks import SingleRank
from vllm_wt.registry import Backend, Registry
from vllm_wt.round import State
from vllm_wt.source import StateDictSource
from vllm_wt.spec import BackendSpec, Kind

from .support.native_engine import MyEngine, MyModel, holds
from .support.rank_processes import two_processes


@pytest.fixture
def engine():
    return MyEngine()


@pytest.fixture
def model():
    return MyModel()


@pytest.fixture
def worker(engine, model):
    return NativeRound(engine, model, SingleRank())


@pytest.fixture
def quick(monkeypatch):
    """A call that does not end is not waited for long."""
    monkeypatch.setattr("vllm_wt.native_round.ABORT_S", 0.01)


def init_info(**changes: Any) -> dict[str, Any]:
    return {"scale": 1.0} | changes


def update_info(number: float, *which: str, **changes: Any) -> dict[str, Any]:
    return {"names": list(which or "ab"), "value": number} | changes


def connected(worker: NativeRound) -> NativeRound:
    worker.init(init_info())
    return worker


def push(worker: NativeRound, value: float) -> None:
    worker.start()
    worker.update(update_info(value))
    worker.finish()


def test_a_round_in_parts_loads_nothing_before_finish(worker, engine, model):
    """The parts come in one buffer, which is used again and overwritten."""
    worker.init(init_info(scale=2.0))
    worker.start()
    assert worker.state is State.STARTED
    worker.update(update_info(1.5, "b"))
    worker.update(update_info(1.5, "a"))
    assert model.weights == {}
    worker.finish()
    assert worker.state is State.IDLE
    assert worker.has_agreed
    assert model.weights == holds(3.0)
    assert engine.calls == ["init", "start", "receive", "receive", "finish"]
    assert worker.report() == {
        "rank": 0,
        "state": "idle",
        "version": None,
        "torn": False,
        "streams": False,
    }


def test_the_plan_is_used_again_until_something_else_comes(worker, model):
    connected(worker)
    push(worker, 1.0)
    push(worker, 2.0)
    assert len(model.used) == 1
    worker.start()
    worker.update(update_info(3.0, shapes={"a": [1, 2]}))
    worker.finish()
    assert [plan.manifest.tensors[0].shape for plan in model.used] == [(2,), (1, 2)]
    worker.init(init_info())  # others may have used the loader before
    push(worker, 4.0)
    assert len(model.used) == 3
    assert model.weights == holds(4.0)


BAD_UPDATES = [
    (update_info(1.0, extra=1), "extra", "MyUpdateInfo has no field 'extra'"),
    ({"names": ["a"]}, "value", "MyUpdateInfo lacks the field 'value'"),
    (update_info(1.0, names="a"), "names", "wrong value in the field 'names'"),
    (update_info(1.0, names=["a", 1]), "names.1", "wrong value in the field 'names.1'"),
    (update_info(1.0, value="1"), "value", "wrong value in the field 'value'"),
    (update_info(1.0, deadline_s=0), "deadline_s", "wrong value in the field 'deadline_s'"),
    (update_info(1.0, deadline_s=1e9), "deadline_s", "wrong value in the field 'deadline_s'"),
    ([update_info(1.0)], "update_weights", "MyUpdateInfo must be a mapping"),
    (update_info(1.0, value=object()), "update_weights", "MyUpdateInfo is not JSON-safe"),
]


@pytest.mark.parametrize(("data", "where", "says"), BAD_UPDATES)
def test_a_wrong_update_info_is_refused_and_ends_the_round(
    worker, engine, model, data, where, says
):
    connected(worker).start()
    with pytest.raises(InvalidInfo, match=says.replace("(", r"\(")) as error:
        worker.update(data)
    assert (error.value.backend, error.value.where) == ("mine", where)
    assert error.value.cure
    assert engine.calls == ["init", "start", "abort"]
    assert (worker.state, model.weights) == (State.IDLE, {})
    push(worker, 2.0)
    assert model.weights == holds(2.0)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (init_info(session="s1"), "session"),
        ({}, "scale"),
        (init_info(scale=None), "scale"),
        (init_info(deadline_s=-1.0), "deadline_s"),
        (None, "init_weight_transfer_engine"),
    ],
)
def test_a_refused_trainer_leaves_the_one_that_is_connected(worker, engine, model, data, where):
    connected(worker).start()
    worker.update(update_info(1.0))
    with pytest.raises(InvalidInfo) as error:
        worker.init(data)
    assert (error.value.backend, error.value.where) == ("mine", where)
    worker.finish()
    assert model.weights == holds(1.0)
    assert "shutdown" not in engine.calls


def test_infos_without_fields():
    class Plain(WeightTransferEngine):
        init_info_cls = WeightTransferInitInfo
        update_info_cls = WeightTransferUpdateInfo

        def init_transfer_engine(self, init_info):
            pass

        def receive_weights(self, update_info, load_weights):
            load_weights([("a", torch.ones(2)), ("b", torch.ones(3))])

    model = MyModel()
    context = WorkerContext(backend="plain", device=torch.device("cpu"), rank=0, size=1)
    worker = NativeRound(Plain(context), model, SingleRank())
    worker.init({})
    worker.start()
    worker.update({})
    worker.finish()
    assert model.weights == holds(1.0)
    worker.shutdown()
    with pytest.raises(InvalidInfo, match="has no field 'x'") as error:
        worker.init({"x": 1})
    assert error.value.expected == "only no field at all"


def test_an_info_that_json_cannot_bring_is_a_fault_of_the_package(worker):
    @dataclass
    class Odd(WeightTransferInitInfo):
        tensor: torch.Tensor

    worker._engine.init_info_cls = Odd
    with pytest.raises(PluginError, match="Odd cannot be decoded"):
        worker.init({"tensor": [1.0]})


def test_an_info_class_that_would_not_be_decoded_strictly_is_refused_at_once():
    @dataclass
    class Lax:
        x: int

    with pytest.raises(TypeError, match=r"init_info_cls must derive from WeightTransferInitInfo"):

        class Engine(WeightTransferEngine):
            init_info_cls = Lax


@pytest.mark.parametrize(
    ("call", "args"), [("start", ()), ("update", (update_info(1.0),)), ("finish", ())]
)
def test_a_round_before_init(worker, call, args):
    with pytest.raises(WrongOrder, match="before init") as error:
        getattr(worker, call)(*args)
    assert "connect first" in error.value.cure


def test_a_call_out_of_turn(worker, model):
    connected(worker)
    with pytest.raises(WrongOrder, match="receive in state 'idle'"):
        worker.update(update_info(1.0))
    with pytest.raises(WrongOrder, match="finish in state 'idle'"):
        worker.finish()
    worker.start()
    worker.update(update_info(1.0))
    with pytest.raises(WrongOrder, match="start a round in state 'started'"):
        worker.start()
    with pytest.raises(WrongOrder, match="drafts is not possible"):
        worker.refuse("drafts", "leave it out")
    worker.finish()
    assert model.weights == holds(1.0)


@pytest.mark.parametrize("parts", [["aba"], ["ab", "b"]], ids=["in one call", "in two"])
def test_a_tensor_that_comes_twice(worker, model, parts):
    connected(worker).start()
    *before, last = parts
    for names in before:
        worker.update(update_info(1.0, *names))
    with pytest.raises(ManifestMismatch, match="twice in one round"):
        worker.update(update_info(2.0, *last))
    assert (worker.state, model.weights) == (State.IDLE, {})
    push(worker, 3.0)
    assert model.weights == holds(3.0)


def test_a_dtype_that_cannot_be_sent(worker):
    connected(worker).start()
    worker._engine.receive_weights = lambda info, load_weights: load_weights(
        [("a", torch.empty(2, dtype=torch.bits16))]
    )
    with pytest.raises(ManifestMismatch, match="dtype that cannot be sent"):
        worker.update(update_info(1.0))


def test_an_incomplete_set_is_refused_with_the_cure(worker, model):
    connected(worker)
    push(worker, 1.0)
    worker.start()
    worker.update(update_info(2.0, "b"))
    with pytest.raises(LoadError, match="'a'") as error:
        worker.finish()
    assert error.value.cure == "send every tensor of the checkpoint"
    assert not worker.torn
    assert model.weights == holds(1.0)
    push(worker, 3.0)
    assert model.weights == holds(3.0)


def test_nothing_at_all(worker, engine, model):
    connected(worker).start()
    with pytest.raises(Aborted, match="before any weights came"):
        worker.finish()
    assert engine.calls[-1] == "abort"
    push(worker, 1.0)


def test_a_model_that_sleeps_is_not_touched(worker, model):
    connected(worker).start()
    worker.update(update_info(1.0))
    model.asleep = WrongOrder("The weights have no memory")
    with pytest.raises(WrongOrder, match="no memory"):
        worker.finish()
    assert (worker.state, worker.torn, model.weights) == (State.IDLE, False, {})


def test_a_failing_receive_leaves_the_weights(worker, engine, model):
    connected(worker)
    push(worker, 1.0)
    worker.start()
    with pytest.raises(TransportError, match="OSError: cable") as error:
        worker.update(update_info(2.0, fail_on=0))
    assert (error.value.backend, error.value.where) == ("mine", "update_weights")
    with pytest.raises(WrongOrder):
        worker.finish()
    assert model.weights == holds(1.0)
    push(worker, 3.0)
    assert model.weights == holds(3.0)


def test_a_stuck_receive_is_left_behind(worker, engine, model, quick):
    engine.hears_aborts = False
    connected(worker).start()
    with pytest.raises(Timeout, match="update_weights is not done") as error:
        worker.update(update_info(1.0, "b", stall_on=0, deadline_s=0.05))
    assert error.value.expected == "within 0.05 s"
    assert engine.calls[-1] == "abort"
    call = worker._call
    for refused in (worker.start, lambda: worker.init(init_info())):
        with pytest.raises(TransportError, match="not come to its end"):
            refused()
    worker.shutdown()
    assert "shutdown" not in engine.calls
    with pytest.raises(Aborted, match="The round is over"):
        engine.load_weights([("a", torch.ones(2))])
    engine.go.set()
    call.join(60)
    assert model.weights == {}
    connected(worker)
    push(worker, 2.0)
    assert model.weights == holds(2.0)


def test_a_receive_that_hears_the_abort_holds_nobody_up(worker, engine, model):
    connected(worker).start()
    with pytest.raises(Timeout):
        worker.update(update_info(1.0, stall_on=0, deadline_s=0.05))
    push(worker, 2.0)
    assert model.weights == holds(2.0)


def test_a_stuck_init_is_left_behind(worker, engine, model, quick):
    receive = engine.init_transfer_engine
    engine.hears_aborts = False
    engine.init_transfer_engine = lambda info: engine.stall()
    with pytest.raises(Timeout, match="init_weight_transfer_engine is not done"):
        worker.init(init_info(deadline_s=0.05))
    call = worker._call
    with pytest.raises(WrongOrder, match="before init"):
        worker.start()
    with pytest.raises(TransportError, match="not come to its end"):
        worker.init(init_info())
    engine.go.set()
    call.join(60)
    engine.init_transfer_engine = receive
    push(connected(worker), 1.0)
    assert engine.calls.index("shutdown") < engine.calls.index("init")
    assert model.weights == holds(1.0)


def test_an_info_without_a_deadline_has_the_default(worker, engine, monkeypatch):
    monkeypatch.setattr("vllm_wt.native_round.ROUND_S", 0.05)
    connected(worker).start()
    with pytest.raises(Timeout) as error:
        worker.update(update_info(1.0, stall_on=0, deadline_s=None))
    assert error.value.expected == "within 0.05 s"


def test_a_failing_commit_is_torn_until_a_full_one(worker, engine, model):
    connected(worker).start()
    worker.update(update_info(1.0))
    model.fail = "bad layer"
    with pytest.raises(TornModel, match="ValueError: bad layer"):
        worker.finish()
    assert worker.torn
    assert engine.calls[-1] == "abort"
    model.fail = None
    worker.init(init_info())
    assert worker.torn
    push(worker, 2.0)
    assert not worker.torn
    assert model.weights == holds(2.0)


@pytest.mark.parametrize("ends", ["well", "in receive", "incomplete", "torn", "given up"])
def test_the_copies_are_freed(worker, engine, model, ends, monkeypatch):
    # pytest keeps what is logged, and with a traceback all that was in use then.
    monkeypatch.setattr(logging.getLogger("vllm_wt.commit"), "disabled", True)
    connected(worker).start()
    for name in "b" if ends == "incomplete" else "ba":
        worker.update(update_info(1.0, name))
    copies = [weakref.ref(copy) for _, copy in worker._copied.weights()]
    assert copies[0]().tolist() == holds(1.0)["b"]
    match ends:
        case "well":
            worker.finish()
        case "in receive":
            with pytest.raises(TransportError):
                worker.update(update_info(1.0, names=[], fail_on=0))
        case "incomplete":
            with pytest.raises(LoadError):
                worker.finish()
        case "torn":
            model.fail = "bad layer"
            with pytest.raises(TornModel):
                worker.finish()
        case "given up":
            worker.init(init_info())
    assert [copy() for copy in copies] == [None] * len(copies)


def test_a_new_trainer_replaces_the_first(worker, engine, model):
    connected(worker).start()
    worker.update(update_info(1.0))
    worker.init(init_info(scale=3.0))
    assert engine.calls == ["init", "start", "receive", "abort", "shutdown", "init"]
    with pytest.raises(WrongOrder):
        worker.finish()
    push(worker, 1.0)
    assert model.weights == holds(3.0)


def test_a_failed_init_disconnects(worker, model):
    connected(worker)
    with pytest.raises(TransportError, match="OSError: cable"):
        worker.init(init_info(fail_on=0))
    with pytest.raises(WrongOrder, match="before init"):
        worker.start()
    push(connected(worker), 1.0)


def test_shutdown_twice_then_init(worker, engine, model):
    connected(worker)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(WrongOrder, match="before init"):
        worker.start()
    push(connected(worker), 1.0)
    assert model.weights == holds(1.0)


def test_hooks_that_fail_are_logged_and_change_no_outcome(worker, engine, model, caplog):
    def broken(*_):
        raise OSError("odd")

    connected(worker)
    engine.finish_weight_update = engine.abort_weight_update = engine.shutdown = broken
    push(worker, 1.0)
    assert model.weights == holds(1.0)
    worker.start()
    with pytest.raises(TransportError, match="OSError: cable"):
        worker.update(update_info(2.0, fail_on=0))
    worker.shutdown()
    for what in ("finish", "abort", "shut down"):
        assert f"did not {what} cleanly" in caplog.text


# -- two ranks, in processes of their own --------------------------------------------------------


class Pair:
    """Two workers that are called at once, as vLLM does."""

    def __init__(self, processes) -> None:
        self._processes = processes

    def call(self, name: str, *args: Any, fail: dict[int, str] | None = None) -> dict[str, Any]:
        """What the highest rank says; the other one may not raise, and both must be in one state."""
        for rank, process in enumerate(self._processes):
            process.tell(call=name, args=args, fail=(fail or {}).get(rank))
        zero, one = [process.answer() for process in self._processes]
        assert zero["raised"] is None, "rank 0 raised, which puts vLLM out of step"
        assert {**zero, "raised": None, "ranks": {}} == {**one, "raised": None, "ranks": {}}
        return one

    def push(self, value: float) -> None:
        self.call("start")
        self.call("update", update_info(value))
        done = self.call("finish")
        assert (done["raised"], done["torn"], done["weights"]) == (None, False, holds(value))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with two_processes("native_process.py", tmp_path_factory.mktemp("native")) as processes:
        yield Pair(processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_is_raised_by_the_highest_and_loaded_by_none(pair, rank):
    refused = pair.call("init", init_info(fail_on=rank))
    assert (refused["raised"], refused["ranks"]) == (
        "TransportError",
        {str(rank): "OSError: cable"},
    )
    assert pair.call("init", init_info())["agreed"]
    pair.push(1.0)
    pair.call("start")
    failed = pair.call("update", update_info(2.0, fail_on=rank))
    assert (failed["raised"], failed["ranks"]) == ("TransportError", {str(rank): "OSError: cable"})
    assert not failed["agreed"]
    late = pair.call("finish")
    assert (late["raised"], late["weights"]) == ("WrongOrder", holds(1.0))
    pair.push(3.0)


def test_what_stalls_on_one_rank_is_a_timeout_of_all(pair):
    pair.call("init", init_info())
    pair.push(1.0)
    pair.call("start")
    stuck = pair.call("update", update_info(2.0, stall_on=0, deadline_s=0.2))
    assert (stuck["raised"], list(stuck["ranks"])) == ("Timeout", ["0"])
    assert (stuck["state"], stuck["weights"]) == ("idle", holds(1.0))
    pair.push(2.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_commit_that_fails_on_one_rank_is_torn_on_both(pair, rank):
    pair.call("init", init_info())
    pair.push(1.0)
    pair.call("start")
    pair.call("update", update_info(1.0))
    torn = pair.call("finish", fail={rank: "bad layer"})
    assert (torn["raised"], list(torn["ranks"]), torn["torn"]) == ("TornModel", [str(rank)], True)
    pair.push(2.0)


# -- the package and the registry ----------------------------------------------------------------

ARTICLE = '''
from dataclasses import dataclass
from typing import Iterator, Callable, Any
from torch import Tensor
from vllm_wt.native import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
# define custom dataclasses for initialization and update weights metadata
@dataclass
class MyInitInfo(WeightTransferInitInfo):
    """Custom initialization info."""
    ...
@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    """Custom update info."""
    ...
# custom weight transfer engine
class MyWeightTransferEngine(WeightTransferEngine):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo
    def init_transfer_engine(self, init_info: MyInitInfo):
        ...
    def receive_weights(
        self,
        update_info: MyUpdateInfo,
        load_weights: Callable[[list[tuple[str, Tensor]]], None],
    ):
        ...
    @classmethod
    def trainer_send_weights(
        cls,
        iterator: Iterator[tuple[str, Tensor]],
        trainer_args: dict[str, Any] | Any,
    ):
        ...
# finally, register the weight transfer engine
from vllm_wt.native import WeightTransferEngineFactory
WeightTransferEngineFactory.register_engine("my_weight_transfer", MyWeightTransferEngine)
'''


@pytest.fixture
def found(monkeypatch):
    """A registry of this test's own, in an environment without vLLM."""
    found = Registry()
    monkeypatch.setattr(registry, "default", lambda: found)
    monkeypatch.setitem(sys.modules, "vllm", None)
    return found


def test_the_article_as_it_is_printed(tmp_path, monkeypatch, found):
    """But for its imports."""
    (tmp_path / "t_article.py").write_text(ARTICLE)
    monkeypatch.syspath_prepend(tmp_path)
    cls = registry.resolve("t_article:MyWeightTransferEngine", backend="my_weight_transfer")
    monkeypatch.delitem(sys.modules, "t_article")
    spec = found.get("my_weight_transfer").spec
    assert (spec.kind, spec.native) == (Kind.NATIVE, "t_article:MyWeightTransferEngine")
    worker = NativeRound(
        cls(WorkerContext(backend=spec.name, device=torch.device("cpu"), rank=0, size=1)),
        MyModel(),
        SingleRank(),
    )
    worker.init({})
    worker.start()
    worker.update({})
    with pytest.raises(Aborted, match="before any weights came"):
        worker.finish()


def test_registering_in_code(found):
    register = WeightTransferEngineFactory.register_engine
    register("one", MyEngine)
    register("one", MyEngine.__module__, "MyEngine")
    register("two", "some.module", "Engine")
    assert found.get("one").spec.native == f"{MyEngine.__module__}:MyEngine"
    assert found.get("two").spec.native == "some.module:Engine"
    with pytest.raises(PluginError, match="'one' is taken by this process") as error:
        register("one", "some.module", "Engine")
    assert error.value.cure == "choose another name"

    class Local(MyEngine):
        pass

    with pytest.raises(ValueError, match="is not of the form"):
        register("three", Local)


def test_a_class_that_an_entry_point_names_may_register_itself(found):
    spec = BackendSpec(name="one", kind=Kind.NATIVE, native=f"{MyEngine.__module__}:MyEngine")
    found.add(Backend(spec, "dist-one", "1.0"))
    WeightTransferEngineFactory.register_engine("one", MyEngine)
    assert found.get("one").distribution == "dist-one"


def test_connecting_to_a_backend_without_a_side_for_weight_sync(found):
    WeightTransferEngineFactory.register_engine("one", MyEngine)
    with pytest.raises(InvalidInfo, match="no side for WeightSync") as error:
        trainer_engine("one", StateDictSource({"a": torch.ones(2)}))
    assert "init_weight_transfer_engine, start_weight_update" in error.value.cure
    assert error.value.backend == "one"
