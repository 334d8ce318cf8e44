"""``vllm-wt bench`` runs the benchmarks that backend packages name."""

import json

import pytest

from vllm_wt import registry
from vllm_wt.cli import main
from vllm_wt.registry import Backend, Registry
from vllm_wt.spec import BackendSpec, Kind

RESULT = {
    "name": "own",
    "value": 1.0,
    "baseline": 2.0,
    "unit": "s",
    "ratio": 0.5,
    "bound": 1.0,
    "ok": True,
    "samples": {},
    "details": {},
}


def well():
    return RESULT, "half a second"


def badly():
    return RESULT | {"ok": False}, "too slow"


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Two packages in place of those of the environment; how often they were looked for."""
    asked = []
    found = Registry()
    paths = {
        "t_one": {"own": f"{__name__}:well", "wire": f"{__name__}:well"},
        "t_two": {"own": f"{__name__}:badly", "gone": "vllm_wt.no_such_module:run"},
    }
    for name, benchmarks in paths.items():
        spec = BackendSpec(
            name=name, kind=Kind.TRANSPORT, transport="pkg.mod:Class", benchmarks=benchmarks
        )
        found.backends[name] = Backend(spec, f"dist-{name}", "1.0")
    monkeypatch.setattr(registry, "default", lambda: asked.append(1) or found)
    return asked


def test_in_words_and_json(capsys):
    assert main(["bench", "own"]) == 0
    words, line = capsys.readouterr().out.splitlines()
    assert words == "half a second"
    assert json.loads(line) == RESULT


def test_json_alone(capsys):
    assert main(["bench", "own", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT


def test_a_name_that_is_taken_has_the_backends_before_it(capsys):
    assert main(["bench", "t_one-wire", "--json"]) == 0
    assert main(["bench", "t_two-own", "--json"]) == 1
    assert [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()] == [
        True,
        False,
    ]


def test_code_that_is_missing(capsys):
    assert main(["bench", "gone"]) == 1
    said = capsys.readouterr().err
    assert "The code of backend 't_two' cannot be imported" in said
    assert "vllm_wt.no_such_module" in said


def test_other_commands_look_for_no_packages(packages, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert packages == []
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert packages == [1]
    assert "of the backend t_two" in capsys.readouterr().out
