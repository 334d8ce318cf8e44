"""``vllm-wt bench plan`` on a model of two layers: what it prints and checks, not how fast it is."""

import json

import pytest

from vllm_wt.cli import main
from vllm_wt.cli.bench_plan import _in_process, _result
from vllm_wt.errors import EngineError, InvalidInfo

SMALL = ["bench", "plan", "--layers", "2", "--experts", "4", "--rounds", "3", "--small-only"]
RECORDED = {"tensors": 100, "seconds": 5.0, "megabytes": 500.0}
ROUNDS = {
    "tensors": 100,
    "copies": 100,
    "ours_s": [0.001, 0.002, 0.03],
    "baseline_s": [0.01, 0.02, 0.3],
    "checked": True,
    "vllm": "0",
    "torch": "0",
}


@pytest.mark.slow
def test_json(capfd):
    code = main([*SMALL, "--json"])
    (line,) = capfd.readouterr().out.splitlines()
    result = json.loads(line)
    assert code == (0 if result["ok"] else 1)
    assert {key: result[key] for key in ("name", "unit", "bound")} == {
        "name": "plan",
        "unit": "us/tensor",
        "bound": 0.1,
    }
    assert set(result) - {"name", "unit", "bound"} == {
        "value",
        "baseline",
        "ratio",
        "ok",
        "samples",
        "details",
    }
    assert {key: len(each) for key, each in result["samples"].items()} == {
        "ours_s": 3,
        "baseline_s": 3,
    }
    assert min(result["samples"]["ours_s"] + result["samples"]["baseline_s"]) > 0
    details = result["details"]
    # Each layer: q, k, v, o, four norms, the gate, three matrices of each expert.
    assert details["tensors"] == 2 * (9 + 3 * 4) + 3
    assert details["copies"] >= details["tensors"]
    assert details["checked"] is True
    assert details["real_model"] is None
    assert details["seconds"] == min(details["all_seconds"]) > 0
    assert 0 <= details["megabytes"] < 500
    # Per layer: four norms, qkv, o, gate, experts; the embedding, a norm, the head.
    modules = ("modules_direct", "modules_layerwise", "modules_fallback")
    assert sum(details[each] for each in modules) == 2 * 8 + 3


@pytest.mark.parametrize(
    ("recorded", "rounds", "ok"),
    [
        ({}, {}, True),
        ({"seconds": 5.1}, {}, False),
        ({"megabytes": 501.0}, {}, False),
        ({}, {"checked": False}, False),
        ({}, {"ours_s": [0.0011, 0.0022, 0.03]}, False),
        ({}, {"ours_s": [0.001, 0.002, 0.2]}, True),
    ],
)
def test_ok_demands_every_bound(recorded, rounds, ok):
    result = _result({"small": RECORDED | recorded}, ROUNDS | rounds)
    assert result["ok"] is ok


def test_figures():
    real = {"tensors": 7}
    result = _result({"small": RECORDED, "real": real}, ROUNDS)
    assert result["value"] == 20.0  # the middle round: 2 ms for 100 tensors
    assert result["baseline"] == 200.0
    assert result["ratio"] == 0.1
    assert result["details"]["real_model"] == real
    assert result["details"]["seconds"] == 5.0


def test_errors_cross_from_the_measuring_process(tmp_path):
    with pytest.raises(InvalidInfo, match="no such model folder"):
        _in_process({"measure": "recording", "model": str(tmp_path / "nothing")})


def test_a_measuring_process_that_dies_is_an_error():
    with pytest.raises(EngineError, match="exit code 1"):
        _in_process({"measure": "no such measure"})


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--layers", "0"], ["commit", "--rounds", "-1"], ["wire", "--tensors", "0"]],
)
def test_nothing_to_measure_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert "is less than 1" in capsys.readouterr().err
