"""Who sends how much to whom as a picture. matplotlib is loaded when one is drawn, and not before."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from vllm_wt.errors import BackendUnavailable, InvalidInfo
from vllm_wt_sharded.layout import BACKEND
from vllm_wt_sharded.plan_report import Report, counted

_MOST_PRINTED = 16
"""Ranks, and workers, up to which each cell has its value printed in it."""
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))


def require_possible(path: Path) -> None:
    """Raise where no picture can be drawn to this file, before all work.

    Raises:
        InvalidInfo: It is no ``.png``, or has no folder.
        BackendUnavailable: matplotlib is not installed.
    """
    _figures()
    if path.suffix != ".png" or not path.parent.is_dir():
        raise InvalidInfo(
            "No picture can be written there",
            backend=BACKEND,
            where="plot",
            expected="a file name that ends in .png, in a folder that exists",
            got=path,
            cure="choose another file name",
        )


def draw(report: Report, path: Path) -> None:
    """Draw the bytes of each link, with what each rank gives and each worker takes, as a PNG file.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    needed = report.links.needed
    unit, scale = next(each for each in _UNITS if needed.max(initial=1) >= each[1])
    matrix = needed / scale
    ranks, workers = matrix.shape
    wide, high = (min(10.0, max(3.6, 0.7 * workers)), min(8.0, max(2.4, 0.42 * ranks)))
    figure = _figures().Figure(figsize=(wide + 3.4, high + 2.4), dpi=110, layout="constrained")
    figure.suptitle(f"{report.spec}: what {counted(ranks, 'rank')} give to {report.receivers}")
    grid = figure.add_gridspec(2, 3, width_ratios=(wide, 1.5, 0.2), height_ratios=(1.0, high))
    cells = figure.add_subplot(
        grid[1, 0], xlabel="worker, engine by engine", ylabel="rank of the trainer"
    )
    # From 0, so that half as much looks like half as much.
    image = cells.imshow(matrix, cmap="Blues", vmin=0, vmax=matrix.max(), aspect="auto")
    for axis, count in ((cells.xaxis, workers), (cells.yaxis, ranks)):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if count <= _MOST_PRINTED:
            axis.set_ticks(range(count))
    if max(ranks, workers) <= _MOST_PRINTED:
        _print_values(cells, matrix)
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 2]), label=f"{unit} over a link")
    taken = figure.add_subplot(grid[0, 0], sharex=cells, ylabel=f"{unit} taken")
    taken.bar(range(workers), matrix.sum(axis=0), _width(workers))
    taken.set_title(f"max / mean {report.into['max_over_mean']:.3f}", fontsize="medium")
    taken.tick_params(labelbottom=False)
    given = figure.add_subplot(grid[1, 1], sharey=cells)
    given.barh(range(ranks), matrix.sum(axis=1), _width(ranks))
    given.set_xlabel(f"{unit} given\nmax / mean {report.out['max_over_mean']:.3f}")
    given.tick_params(labelleft=False)
    figure.savefig(path)


def _width(count: int) -> float:
    """Of a bar; so many of them would be stripes if there were gaps between."""
    return 0.8 if count <= _MOST_PRINTED else 1.0


def _print_values(cells: Any, matrix: Any) -> None:
    """In each cell, dark on light or light on dark."""
    dark = matrix.max() * 0.6
    for (rank, worker), value in np.ndenumerate(matrix):
        color = "white" if value > dark else "black"
        cells.text(
            worker, rank, f"{value:.3g}", ha="center", va="center", color=color, fontsize="small"
        )


def _figures() -> Any:
    """matplotlib's module of figures, which needs no display.

    Raises:
        BackendUnavailable: It is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BackendUnavailable(
            "A picture is drawn by matplotlib, and it cannot be imported",
            backend=BACKEND,
            where="plot",
            got=error,
            cure="pip install 'vllm-wt-sharded[plot]'; or leave out --plot",
        ) from error
