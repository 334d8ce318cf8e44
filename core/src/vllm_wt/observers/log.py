"""A line of JSON for each round."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_wt.hookspecs import hookimpl

if TYPE_CHECKING:
    from vllm_wt.errors import WeightTransferError
    from vllm_wt.results import PushResult


class RoundLog:
    """Appends to a file, which may be rotated meanwhile: it is opened for each line.

    A round that was committed has ``ok`` true, what `PushResult` has (``version``, ``nbytes``,
    ``tensors``, seconds ``gather_s``, ``total_s``, ``stop_s``, ``commit_s``, ``resume_s``, and
    ``gb_per_s``), in ``engines`` the `Stages` of each, and in ``failed`` the facts of the errors for
    which engines were left out. One that has failed has ``ok`` false, ``version``, and the facts of the
    ``error``. Both have ``time``, seconds since 1970.

    Args:
        path: Of the file.
        link_gb_per_s: Speed of the trainer's link in 10^9 bytes a second, if it is known: then rounds
            have ``link_share``, what part of that ``gb_per_s`` is.
    """

    def __init__(self, path: str | os.PathLike[str], *, link_gb_per_s: float | None = None) -> None:
        self._path = path
        self._link_gb_per_s = link_gb_per_s

    @hookimpl
    def vllm_wt_round_finished(self, stats: PushResult) -> None:
        line: dict[str, Any] = {
            "ok": True,
            "version": stats.version,
            "nbytes": stats.nbytes,
            "tensors": stats.tensors,
            "gather_s": stats.gather_s,
            "total_s": stats.total_s,
            "stop_s": stats.stop_s,
            "commit_s": stats.commit_s,
            "resume_s": stats.resume_s,
            "gb_per_s": stats.gb_per_s,
            "engines": {name: asdict(stages) for name, stages in stats.engines.items()},
            "failed": {name: error.facts() for name, error in stats.failed.items()},
        }
        if self._link_gb_per_s is not None:
            line["link_share"] = stats.gb_per_s / self._link_gb_per_s
        self._write(line)

    @hookimpl
    def vllm_wt_round_failed(self, version: int, error: WeightTransferError) -> None:
        self._write({"ok": False, "version": version, "error": error.facts()})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **line}) + "\n")
