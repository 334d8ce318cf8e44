"""The picture of a plan; what it shows is for people to look at."""

import subprocess
import sys

import numpy as np
import pytest

from vllm_wt.errors import BackendUnavailable, InvalidInfo
from vllm_wt_sharded import plan_plot

from .test_plan_report import report


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (16, 16), (40, 3), (300, 200)])
def test_a_picture(tmp_path, shape):
    pytest.importorskip("matplotlib")
    from PIL import Image

    links = np.random.default_rng(0).integers(0, 5_000_000_000, shape)
    path = tmp_path / "links.png"
    plan_plot.require_possible(path)
    plan_plot.draw(report(links, links, links), path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        width, height = image.size
        colours = len(image.convert("RGB").getcolors(1 << 24))
    assert 600 <= width <= 1600
    assert 400 <= height <= 1300
    assert colours > 20


def test_values_are_printed_where_they_can_be_read(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    printed = []
    monkeypatch.setattr(plan_plot, "_print_values", lambda _, matrix: printed.append(matrix.shape))
    for shape in ((16, 16), (17, 2), (2, 17)):
        links = np.ones(shape, dtype=np.int64)
        plan_plot.draw(report(links, links, links), tmp_path / "links.png")
    assert printed == [(16, 16)]


def test_nothing_is_needed(tmp_path):
    pytest.importorskip("matplotlib")
    nothing = np.zeros((2, 2), dtype=np.int64)
    plan_plot.draw(report(nothing, nothing, nothing), tmp_path / "links.png")
    assert (tmp_path / "links.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["links.pdf", "links", "no-such-folder/links.png"])
def test_no_such_picture(tmp_path, monkeypatch, name):
    monkeypatch.setattr(plan_plot, "_figures", lambda: None)
    with pytest.raises(InvalidInfo, match="No picture can be written there") as caught:
        plan_plot.require_possible(tmp_path / name)
    assert caught.value.cure


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(BackendUnavailable, match=r"pip install 'vllm-wt-sharded\[plot\]'"):
        plan_plot.require_possible(tmp_path / "links.png")


def test_it_is_loaded_when_a_picture_is_drawn_and_not_before():
    code = "import sys, vllm_wt_sharded.plan_cli; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
