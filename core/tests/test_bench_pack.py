"""``vllm-wt bench pack`` on little: what it prints and checks, not how fast it is."""

import json

import pytest
import torch

from vllm_wt import packing
from vllm_wt.cli import main
from vllm_wt.cli.bench_pack import _sizes

SMALL = ["bench", "pack", "--megabytes", "8", "--tensors", "200", "--rounds", "2"]


def test_the_last_line_is_the_result(capsys):
    code = main(SMALL)
    summary, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert code == (0 if result["ok"] else 1)
    assert summary.startswith("8 MB in 200 tensors: pack and unpack ")
    assert {key: result[key] for key in ("name", "unit", "bound")} == {
        "name": "pack",
        "unit": "GB/s",
        "bound": 0.85,
    }
    assert {key: len(each) for key, each in result["samples"].items()} == {
        "ours_s": 2,
        "baseline_s": 2,
    }
    details = result["details"]
    assert result["ok"] == (result["ratio"] >= 0.85 and details["checked"])
    assert details["checked"] is True
    assert (details["device"], details["tensors"], details["dtypes"]) == ("cpu", 200, 9)
    assert (details["torch"], details["threads"]) == (torch.__version__, torch.get_num_threads())
    assert details["cores"] >= 1
    assert details["megabytes"] == pytest.approx(8, rel=0.01)


def test_json_only(capsys):
    main([*SMALL, "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["name"] == "pack"


def test_copies_that_leave_something_out_are_not_ok(capsys, monkeypatch):
    class Lossy(packing.Copies):
        def __init__(self, pairs):
            super().__init__(list(pairs)[1:])

    monkeypatch.setattr(packing, "Copies", Lossy)
    assert main([*SMALL, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["details"]["checked"] is result["ok"] is False


def test_sizes_are_mixed_and_the_same_each_time():
    sizes = _sizes(2_147_000_000, 10_000)
    assert sizes == _sizes(2_147_000_000, 10_000)
    assert sum(sizes) == pytest.approx(2_147_000_000, rel=1e-4)
    small = sum(size < 32 << 10 for size in sizes)
    assert 0.6 < small / len(sizes) < 0.75
    assert max(sizes) > 2_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(capsys):
    assert main([*SMALL, "--device", "cuda"]) == 1
    assert "CUDA device" in capsys.readouterr().err
