"""``vllm-wt plan --source``: what is refused before a model is built; and who is asked."""

import json
import sys
from types import SimpleNamespace

import pytest

from vllm_wt import registry
from vllm_wt.cli import main, plan_rank
from vllm_wt.errors import BackendUnavailable
from vllm_wt.loading.plan import Fallback, LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.registry import Backend, Registry
from vllm_wt.spec import BackendSpec, Kind

ENGINE = {"kind": Kind.ENGINE, "worker": "pkg.worker:Engine", "trainer": "pkg.trainer:Engine"}
TRANSPORT = {"kind": Kind.TRANSPORT, "transport": "pkg.mod:Class"}
NATIVE = {"kind": Kind.NATIVE, "native": "pkg.own:Engine"}

asked = []


def planner(request):
    asked.append(request)
    if request.source == "all":
        manifest = Manifest((TensorMeta("a", "float32", (1000,)), TensorMeta("b", "int8", (4,))))
        ranks = [load.plan.nbytes for load in request.rehearse(manifest)]
        return {"bytes": ranks}, [f"links      {sum(ranks)}"]
    raise BackendUnavailable("No rank is built for this test")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Packages in place of those of the environment."""
    asked.clear()
    found = Registry()
    for name, path in (
        ("sharded", f"{__name__}:planner"),
        ("other", f"{__name__}:planner"),
        ("without", None),
        ("gone", "vllm_wt.no_such_module:planner"),
    ):
        spec = BackendSpec(name=name, **ENGINE, planner=path)
        found.backends[name] = Backend(spec, f"dist-{name}", "1.0")
    monkeypatch.setattr(registry, "default", lambda: found)


@pytest.fixture
def model(tmp_path):
    """A folder that says what its tensors are, without vLLM."""
    import torch
    from safetensors.torch import save_file

    save_file({"layers.0.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def said(capsys, *arguments):
    """What a plan that fails says, without having imported vLLM."""
    before = set(sys.modules)
    assert main(["plan", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert not {"vllm"} & (set(sys.modules) - before)
    return err


def test_the_backend_gets_what_was_asked(model, capsys):
    arguments = ["--replicas", "3", "--links", "25", "12.5", "--plot", "links.png"]
    err = said(capsys, "--model", model, "--source", "fsdp:2", *arguments)
    assert "No rank is built for this test" in err
    (request,) = asked
    assert (request.source, request.replicas, request.links) == ("fsdp:2", 3, (25.0, 12.5))
    assert request.plot.name == "links.png"
    assert [tensor.name for tensor in request.manifest.tensors] == ["layers.0.weight"]


def test_what_it_gets_otherwise(model, capsys):
    said(capsys, "--model", model, "--source", "fsdp:2", "--backend", "other")
    (request,) = asked
    assert (request.replicas, request.links, request.plot) == (1, (50.0,), None)


@pytest.fixture
def loads(monkeypatch):
    """What ranks do, in place of vLLM's models: fields of their tiers, by rank. Rank 0 takes one tensor
    in full, and the other one both."""
    tiers = [{"direct": ("m",), "fallback": {"n": ("why",)}}, {"direct": ("m", "o")}]

    def rehearsed(arguments, rank, manifest):
        names = ("a", "b")[: rank + 1]
        plan = LoadPlan(manifest, (), (), {}, {"n": Fallback("n", ("why",), names)}, ())
        fields = {"direct": (), "layerwise": {}, "fallback": {}, "whole": None} | tiers[rank]
        return plan_rank.RankLoad(plan, SimpleNamespace(**fields), "Model", "cpu", 0.0, 0.0)

    monkeypatch.setattr(plan_rank, "rehearsed", rehearsed)
    monkeypatch.setattr(plan_rank, "vllm_release", lambda: "1.2")
    return tiers


def test_all_ranks_are_told(model, loads, capsys):
    assert main(["plan", "--model", model, "--source", "all", "--tp", "2", "--ep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["tp"], found["expert_parallel"]) == ("Model", 2, True)
    assert (found["tensors"], found["names_from"], found["replicas"]) == (2, "source", 1)
    assert found["source"] == {"bytes": [4000, 4004]}
    assert [rank["full"] for rank in found["ranks"]] == [
        {"tensors": 1, "bytes": 4000},
        {"tensors": 2, "bytes": 4004},
    ]
    assert [rank["tensors_needed"] for rank in found["ranks"]] == [1, 2]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]


def test_in_words(model, loads, capsys):
    assert main(["plan", "--model", model, "--source", "all", "--tp", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Model at tensor parallel 2, as vLLM 1.2 has it on cpu",
        "links      8004",
        "full       2 tensors of 4.00 kB have to be put together on each worker, for the model's own "
        "loaders",
        "modules    direct 1 to 2, layerwise 0, fallback 0 to 1 on each worker; --rank without "
        "--source says why",
    ]


def test_the_whole_model_is_made_anew(model, loads, capsys):
    for tiers in loads:
        tiers["whole"] = "for a test"
    assert main(["plan", "--model", model, "--source", "all", "--tp", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the whole model goes through vLLM's reload: for a test"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--source", "a", "--backend", "without"], "'without' plans no transfer from the shards"),
        (["--source", "a", "--backend", "gone"], "The code of backend 'gone' cannot be imported"),
        (["--source", "a", "--backend", "nothing"], "'nothing'"),
        (["--source", "a", "--rank", "0"], "One rank was named"),
        (["--source", "a", "--tp", "0"], "There is no such tensor-parallel size"),
        (["--source", "a", "--tp", "2", "--ep", "4"], "no expert parallel 4 at tensor parallel 2"),
        (["--source", "a", "--tp", "2", "--ep", "1"], "no expert parallel 1 at tensor parallel 2"),
        (["--tp", "2", "--ep", "4"], "no expert parallel 4 at tensor parallel 2"),
        (["--replicas", "2"], "--replicas says something of a transfer"),
        (["--links", "50"], "--links says something of a transfer"),
        (["--plot", "a.png"], "--plot says something of a transfer"),
    ],
)
def test_what_does_not_go_together(model, capsys, options, words):
    err = said(capsys, "--model", model, *options)
    assert words in err
    assert "Cure: " in err
    assert not asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--links", "0"], "0 is no speed"),
        (["--links", "-1"], "-1 is no speed"),
        (["--links", "inf"], "inf is no speed"),
        (["--links", "nan"], "nan is no speed"),
        (["--links", "fast"], "'fast' is not a number"),
        (["--links"], "expected at least one argument"),
        (["--replicas", "0"], "0 is less than 1"),
        (["--ep", "all"], "invalid int value"),
    ],
)
def test_arguments_that_are_none(model, capsys, options, words):
    with pytest.raises(SystemExit):
        main(["plan", "--model", model, "--source", "fsdp:2", *options])
    assert words in capsys.readouterr().err


def test_any_kind_may_name_a_planner():
    for fields in (ENGINE, TRANSPORT, NATIVE):
        assert BackendSpec(name="one", **fields).planner is None
        assert BackendSpec(name="one", **fields, planner="pkg.mod:run").planner == "pkg.mod:run"
        with pytest.raises(ValueError, match=r"^planner='pkg' .* 'package\.module:function'"):
            BackendSpec(name="one", **fields, planner="pkg")
        with pytest.raises(ValueError, match="has planner=5"):
            BackendSpec(name="one", **fields, planner=5)
