"""A BackendSpec refuses what is not of its form, and says what is."""

import dataclasses
import re

import pytest

from vllm_wt.spec import CONTRACT_VERSION, BackendSpec, Capability, Kind

TRANSPORT = {"name": "fast", "kind": Kind.TRANSPORT, "transport": "pkg.mod:Class"}
ENGINE = {
    "name": "fast",
    "kind": Kind.ENGINE,
    "worker": "pkg.worker:Engine",
    "trainer": "pkg.trainer:Engine",
}
NATIVE = {"name": "fast", "kind": Kind.NATIVE, "native": "pkg.own:Engine"}
ENGINE_NEEDS = r"backend 'fast' of kind engine needs exactly \['trainer', 'worker'\], got "
TRANSPORT_NEEDS = r"backend 'fast' of kind transport needs exactly \['transport'\], got "
NATIVE_NEEDS = r"backend 'fast' of kind native needs exactly \['native'\], got "
NO_PATH = r" is not of the form 'package.module:Class'"


@pytest.mark.parametrize(
    "fields",
    [
        TRANSPORT,
        ENGINE,
        NATIVE,
        {**TRANSPORT, "native": "pkg.own:Engine"},
        {**ENGINE, "native": "pkg.own:Engine"},
    ],
    ids=["transport", "engine", "native", "transport and native", "engine and native"],
)
def test_good_spec(fields):
    spec = BackendSpec(**fields)
    assert {name: getattr(spec, name) for name in fields} == fields
    assert (spec.capabilities, spec.summary, spec.contract) == (frozenset(), "", CONTRACT_VERSION)


@pytest.mark.parametrize("name", ["a", "rdma2", "my-own_backend", "a" * 32])
def test_good_name(name):
    assert BackendSpec(**{**TRANSPORT, "name": name}).name == name


@pytest.mark.parametrize(
    "name", ["", "2fast", "_fast", "-fast", "Fast", "fäst", "fa st", "fast\n", "a.b", "a" * 33]
)
def test_bad_name(name):
    with pytest.raises(ValueError, match=r"^backend name .* does not match \[a-z\]"):
        BackendSpec(**{**TRANSPORT, "name": name})


@pytest.mark.parametrize("path", ["m:C", "pkg.mod:_C1", "_p.m2:C"])
def test_good_path(path):
    assert BackendSpec(**{**TRANSPORT, "transport": path}).transport == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "pkg.mod",
        "pkg.mod.Class",
        ":Class",
        "pkg:",
        "pkg:a.b",
        "1pkg:C",
        "p k:C",
        "a:b:c",
        "m:C\n",
    ],
)
def test_bad_path(path):
    with pytest.raises(ValueError, match=r"^transport=.*" + NO_PATH):
        BackendSpec(**{**TRANSPORT, "transport": path})


@pytest.mark.parametrize("field", ["worker", "trainer", "native"])
def test_bad_path_of_an_engine(field):
    with pytest.raises(ValueError, match=f"^{field}='pkg'{NO_PATH}"):
        BackendSpec(**{**ENGINE, field: "pkg"})


def test_any_kind_may_name_a_baseline():
    for fields in (TRANSPORT, ENGINE):
        assert BackendSpec(**fields, baseline="pkg.mod:time").baseline == "pkg.mod:time"
        with pytest.raises(ValueError, match=f"^baseline='pkg'{NO_PATH}"):
            BackendSpec(**fields, baseline="pkg")


def test_any_kind_may_name_benchmarks():
    for kind in (TRANSPORT, ENGINE, NATIVE):
        assert dict(BackendSpec(**kind, benchmarks={"one": "pkg.mod:run"}).benchmarks) == {
            "one": "pkg.mod:run"
        }


@pytest.mark.parametrize(
    ("benchmarks", "message"),
    [
        ({"One": "pkg.mod:run"}, "benchmarks has a name 'One'"),
        (
            {"one": "pkg.mod"},
            "benchmarks['one']='pkg.mod' is not of the form 'package.module:function'",
        ),
    ],
)
def test_bad_benchmarks(benchmarks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BackendSpec(**TRANSPORT, benchmarks=benchmarks)


def test_any_kind_may_name_a_doctor():
    for fields in (TRANSPORT, ENGINE):
        assert BackendSpec(**fields).doctor is None
        assert BackendSpec(**fields, doctor="pkg.mod:checks").doctor == "pkg.mod:checks"
        with pytest.raises(
            ValueError, match=r"^doctor='pkg' is not of the form 'package\.module:fu"
        ):
            BackendSpec(**fields, doctor="pkg")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**TRANSPORT, "transport": None}, TRANSPORT_NEEDS + "transport=None"),
        ({**TRANSPORT, "worker": "a:B"}, TRANSPORT_NEEDS + "worker='a:B'"),
        ({**TRANSPORT, "trainer": "a:B"}, TRANSPORT_NEEDS + "trainer='a:B'"),
        ({**ENGINE, "worker": None}, ENGINE_NEEDS + "worker=None"),
        ({**ENGINE, "trainer": None}, ENGINE_NEEDS + "trainer=None"),
        ({**ENGINE, "transport": "a:B"}, ENGINE_NEEDS + "transport='a:B'"),
        ({**NATIVE, "native": None}, NATIVE_NEEDS + "native=None"),
        ({**NATIVE, "worker": "a:B"}, NATIVE_NEEDS + "worker='a:B'"),
        ({**NATIVE, "transport": "a:B"}, NATIVE_NEEDS + "transport='a:B'"),
    ],
)
def test_each_kind_has_its_own_paths(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        BackendSpec(**fields)


def test_several_transports():
    paths = {"one": "pkg.mod:Class", "two": "pkg.other:Class"}
    spec = BackendSpec(**TRANSPORT, transports=paths, baselines={"two": "pkg.other:Raw"})
    assert spec.transports == paths
    hash(spec)
    paths.clear()
    assert list(spec.transports) == ["one", "two"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transports": {"One": "pkg.mod:Class"}}, "transports has a name 'One'; "),
        ({"transports": {"auto": "pkg.mod:Class"}}, "transports has a name 'auto'; "),
        ({"transports": {1: "pkg.mod:Class"}}, "transports has a name 1; "),
        ({"transports": {"one": "pkg"}}, "transports['one']='pkg' is not of the form "),
        ({"transports": {"one": 5}}, "transports['one']=5 is not of the form "),
        (
            {"transports": {"two": "pkg.other:Class"}},
            "backend 'fast' has transport='pkg.mod:Class', which is none of its transports ",
        ),
        ({"baselines": {"two": "a:B"}}, "backend 'fast' has baselines of no transport: ['two']"),
    ],
)
def test_transports_that_are_none(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        BackendSpec(**TRANSPORT, **fields)


@pytest.mark.parametrize("contract", [0, CONTRACT_VERSION + 1])
def test_other_contract(contract):
    with pytest.raises(
        ValueError,
        match=f"^backend 'fast' was written against contract {contract}, "
        f"this vllm-wt has {CONTRACT_VERSION}; install a matching release of it$",
    ):
        BackendSpec(**TRANSPORT, contract=contract)


def test_kind_must_be_a_kind():
    with pytest.raises(ValueError, match="kind"):
        BackendSpec(**{**ENGINE, "kind": "engine"})


def test_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BackendSpec(**TRANSPORT).name = "other"


def test_a_capability_is_claimed_or_unsupported_for_a_reason():
    spec = BackendSpec(
        **TRANSPORT, capabilities={Capability.CPU}, unsupported={Capability.CUDA: "no GPU code"}
    )
    assert (spec.capabilities, spec.unsupported[Capability.CUDA]) == (
        {Capability.CPU},
        "no GPU code",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capabilities": {"cpu"}}, "has a capability 'cpu', which is none of Capability.CPU, "),
        ({"unsupported": {"cdua": "no"}}, "has a capability 'cdua', which is none of "),
        (
            {"capabilities": {Capability.CPU}, "unsupported": {Capability.CPU: "no"}},
            "claims Capability.CPU and declares it unsupported",
        ),
        (
            {"unsupported": {Capability.CUDA: " "}},
            "gives no reason why it does not do Capability.C",
        ),
        (
            {"unsupported": {Capability.CUDA: None}},
            "gives no reason why it does not do Capability.",
        ),
    ],
)
def test_a_capability_that_is_none(fields, message):
    with pytest.raises(ValueError, match=f"^backend 'fast' {re.escape(message)}"):
        BackendSpec(**TRANSPORT, **fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("summary", None),
        ("transport", 5),
        ("capabilities", None),
        ("capabilities", (one for one in Capability)),
        ("capabilities", "cpu"),
        ("unsupported", [Capability.CUDA]),
        ("transports", ["pkg.mod:Class"]),
        ("baselines", "pkg.mod:Class"),
        ("benchmarks", "pkg.mod:run"),
        ("contract", "1"),
    ],
)
def test_a_field_of_another_type(field, value):
    with pytest.raises(
        ValueError, match=f"^backend 'fast' has {field}=.*, a {type(value).__name__}$"
    ):
        BackendSpec(**{**TRANSPORT, field: value})


def test_a_spec_does_not_change_with_what_it_was_given():
    claimed, unsupported = [Capability.CPU], {Capability.CUDA: "no"}
    spec = BackendSpec(**TRANSPORT, capabilities=claimed, unsupported=unsupported)
    claimed.clear()
    unsupported.clear()
    assert spec.capabilities == {Capability.CPU}
    assert spec.unsupported == {Capability.CUDA: "no"}


def test_a_spec_that_names_no_contract_is_of_the_first(monkeypatch):
    monkeypatch.setattr("vllm_wt.spec.CONTRACT_VERSION", 2)
    with pytest.raises(ValueError, match="was written against contract 1, this vllm-wt has 2"):
        BackendSpec(**TRANSPORT)
