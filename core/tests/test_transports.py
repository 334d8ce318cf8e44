"""A backend with several Transports: the trainer's option chooses, and workers take what it names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from vllm_wt import registry
from vllm_wt.backends import trainer_engine, transport_chosen, transport_named, worker_engine
from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import BackendUnavailable, InvalidInfo
from vllm_wt.ranks import SingleRank
from vllm_wt.registry import Backend, Registry
from vllm_wt.round import WorkerRound
from vllm_wt.source import StateDictSource
from vllm_wt.spec import BackendSpec, Kind
from vllm_wt.transport import TransportProperties

from .conftest import DictLoader, MemoryFabric, MemoryTransport
from .support.engines import assert_equal

LONG_S = 30.0
MODULE = "transports_of_a_test"


class Several:
    """Two Transports over one fabric, and which of them lack their library."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.missing: set[str] = set()
        self.used: list[str] = []
        self.classes = {name: self._make(name) for name in ("first", "second")}
        self.spec = BackendSpec(
            name="both",
            kind=Kind.TRANSPORT,
            transport=f"{MODULE}:first",
            transports={name: f"{MODULE}:{name}" for name in self.classes},
        )
        self.single = BackendSpec(name="single", kind=Kind.TRANSPORT, transport=f"{MODULE}:first")

    def _make(self, name: str) -> type[MemoryTransport]:
        several = self

        class Named(MemoryTransport):
            def __init__(self, endpoint: str, device: torch.device) -> None:
                several.used.append(name)
                super().__init__(endpoint, device)

            @staticmethod
            def require() -> None:
                if name in several.missing:
                    cure = f"pip install {name}"
                    raise BackendUnavailable(f"No {name}", backend="both", cure=cure)

        return Named


@pytest.fixture
def several(fabric: MemoryFabric, monkeypatch: pytest.MonkeyPatch) -> Several:
    several = Several(fabric)
    module: Any = ModuleType(MODULE)
    vars(module).update(several.classes)
    monkeypatch.setitem(sys.modules, MODULE, module)
    specs = (several.spec, several.single)
    found = Registry(backends={spec.name: Backend(spec, "dist", "1.0") for spec in specs})
    monkeypatch.setattr(registry, "default", lambda: found)
    return several


class Pair:
    """A worker, and whatever trainers it is connected to."""

    def __init__(self, backend: str = "both") -> None:
        self.loader = DictLoader()
        context = WorkerContext(backend=backend, device=torch.device("cpu"), rank=0, size=1)
        self.worker = WorkerRound(worker_engine(context), self.loader, SingleRank())
        self._trainers: list[Any] = []

    def init_info(self, **options: Any) -> dict[str, Any]:
        """Of a new trainer."""
        self.state = {"a": torch.rand(7), "b": torch.rand(3)}
        self.trainer = trainer_engine("both", StateDictSource(self.state), **options)
        self._trainers.append(self.trainer)
        return self.trainer.describe(Deadline(LONG_S)).to_wire()

    def push(self, version: int) -> None:
        self.trainer.publish(version, Deadline(LONG_S))
        self.trainer.send(1, Deadline(LONG_S), lambda: None)
        self.worker.start()
        info = self.trainer.update_info("all", Deadline(LONG_S), known=self.trainer.generation)
        self.worker.update(info.to_wire())
        self.worker.finish()

    def close(self) -> None:
        self.worker.shutdown()
        for trainer in self._trainers:
            trainer.shutdown()


@pytest.fixture
def pair(several: Several) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("option", "name", "used"),
    [
        (None, "", "first"),
        ("first", "first", "first"),
        ("second", "second", "second"),
        ("auto", "first", "first"),
    ],
)
def test_both_sides_take_what_the_option_names(several, pair, option, name, used):
    info = pair.init_info(**({} if option is None else {"transport": option}))
    assert info["transport"] == name
    pair.worker.init(info)
    pair.push(1)
    assert_equal(pair.loader.weights, pair.state)
    assert several.used == [used, used]


def test_auto_is_the_first_that_has_its_library(several, pair):
    several.missing = {"first"}
    info = pair.init_info(transport="auto")
    assert info["transport"] == "second"
    pair.worker.init(info)
    assert several.used == ["second", "second"]


def test_auto_with_no_library_says_how_to_get_each(several):
    several.missing = {"first", "second"}
    with pytest.raises(BackendUnavailable) as caught:
        transport_chosen(several.spec, "auto")
    assert "pip install first" in str(caught.value.cure)
    assert "pip install second" in str(caught.value.cure)


def test_each_trainer_is_read_by_its_own(several, pair):
    for option, used in (("second", "second"), ("first", "first"), (None, "first")):
        several.used.clear()
        pair.worker.init(pair.init_info(**({} if option is None else {"transport": option})))
        pair.push(1)
        assert_equal(pair.loader.weights, pair.state)
        assert several.used == [used, used]


def test_what_is_planned_is_for_the_transport_that_is_named(several, pair, monkeypatch):
    seen = []

    class OneByOne(several.classes["second"]):
        properties = TransportProperties(max_descriptors=1)

        def prepare(self, region: Any, copies: Any) -> Any:
            seen.append(len(copies))
            return super().prepare(region, copies)

    monkeypatch.setattr(sys.modules[MODULE], "second", OneByOne)
    pair.worker.init(pair.init_info(transport="second"))
    assert len(seen) > 1
    assert set(seen) == {1}


def test_a_trainer_without_the_library_is_told_what_to_install(several, pair):
    several.missing = {"second"}
    with pytest.raises(BackendUnavailable) as caught:
        pair.init_info(transport="second")
    assert caught.value.cure == "pip install second"


def test_a_worker_without_the_library_is_told_what_to_install(several, pair):
    info = pair.init_info(transport="second")
    several.missing = {"second"}
    with pytest.raises(BackendUnavailable) as caught:
        pair.worker.init(info)
    assert caught.value.cure == "pip install second"
    several.missing = set()
    pair.worker.init(info)
    pair.push(1)
    assert_equal(pair.loader.weights, pair.state)


@pytest.mark.parametrize("option", ["third", "auto ", 3, b"first", ["first"]])
def test_an_option_that_names_none(several, pair, option):
    with pytest.raises(InvalidInfo, match="'both' has no such transport") as caught:
        pair.init_info(transport=option)
    assert caught.value.expected == "'first' or 'second'"
    assert caught.value.got == repr(option)


@pytest.mark.parametrize("name", ["third", "auto", "../x", "a" * 33, "os:system", 3, None])
def test_a_peer_that_names_none(several, pair, name):
    with pytest.raises(InvalidInfo) as caught:
        pair.worker.init(pair.init_info() | {"transport": name})
    assert caught.value.where == "transport"


def test_a_backend_of_one_has_no_such_option(several):
    for option in ("first", "auto"):
        with pytest.raises(InvalidInfo, match="'single' has no such transport") as caught:
            trainer_engine("single", StateDictSource({"a": torch.ones(1)}), transport=option)
        assert caught.value.expected == "none: it has one alone"


def test_a_backend_of_one_needs_no_library_of_several(several):
    several.missing = {"first"}
    assert transport_named(several.single, "") is several.classes["first"]


class WithOptions(MemoryTransport):
    """Takes two of its own."""

    given: ClassVar[list[dict[str, Any]]] = []

    def __init__(
        self, name: str, device: torch.device, *, color: str = "none", size: int = 0
    ) -> None:
        super().__init__(name, device)
        self.given.append({"name": name, "color": color, "size": size})


@pytest.fixture
def with_options(several: Several, monkeypatch: pytest.MonkeyPatch) -> type[WithOptions]:
    """The second one of the backend takes options."""
    vars(sys.modules[MODULE])["second"] = WithOptions
    monkeypatch.setattr(WithOptions, "fabric", several.classes["second"].fabric)
    monkeypatch.setattr(WithOptions, "given", [])
    return WithOptions


def test_a_transports_own_options_reach_the_trainers_side_alone(with_options, pair):
    pair.worker.init(pair.init_info(transport="second", color="red"))
    pair.push(1)
    assert_equal(pair.loader.weights, pair.state)
    trainers, workers = with_options.given
    assert trainers["name"].startswith("trainer-")
    assert (trainers["color"], trainers["size"]) == ("red", 0)
    assert (workers["color"], workers["size"]) == ("none", 0)


@pytest.mark.parametrize(
    ("transport", "known"), [("first", ""), ("second", ", color, size")], ids=["none", "some"]
)
def test_an_option_that_the_transport_has_not(with_options, pair, transport, known):
    with pytest.raises(InvalidInfo, match="'both' has no option 'colour'") as error:
        pair.init_info(transport=transport, colour="red")
    assert error.value.expected == f"one of verify, staging, bucket_nbytes, transport{known}"
