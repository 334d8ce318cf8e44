"""``vllm-wt demo``: a trainer process pushes new weights into a real vLLM engine, verified."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_wt import registry
from vllm_wt.errors import BackendUnavailable
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    reference_tokens,
    save_checkpoint,
)

_NEW_TOKENS = 16
_TRAINER_S = 600.0
"""Seconds that the trainer's process may take for everything."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="sync a random model into a real vLLM engine")
    parser.add_argument("--backend", default="rdma", help="default: %(default)s")
    parser.add_argument("--rounds", type=_positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--tp", type=_positive, default=1, help="tensor-parallel size (%(default)s)"
    )
    parser.add_argument("--hidden", type=_positive, default=256, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=_positive, default=4, help="layers (%(default)s)")
    parser.add_argument("--vocab", type=_positive, default=2048, help="vocabulary (%(default)s)")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--json", action="store_true", help="one JSON object a round")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 only when every round was verified."""
    registry.default().get(arguments.backend)
    # Set before vllm is imported: its start-up talks a lot, and none of it is about the demo.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"The demo starts a vLLM engine, which cannot be imported: {error}",
            cure="pip install vllm (or run `make demo` in a checkout)",
        ) from error
    shape = ModelShape(arguments.hidden, arguments.layers, arguments.vocab, arguments.tied)
    folder = tempfile.TemporaryDirectory(prefix="vllm-wt-demo-")
    with folder, _Screen(arguments.json, arguments.rounds) as screen:
        return _Demo(arguments, shape, Path(folder.name), screen).run()


class _Demo:
    """The engine's process; the trainer is a child of it."""

    def __init__(
        self, arguments: argparse.Namespace, shape: ModelShape, folder: Path, screen: _Screen
    ) -> None:
        self._arguments = arguments
        self._shape = shape
        self._folder = folder
        self._screen = screen
        self._prompts = prompts(shape)
        self._llm: Any = None
        self._previous: list[list[int]] = []
        self._verified = 0

    def run(self) -> int:
        from vllm_wt.clients.local import LocalClient
        from vllm_wt.clients.relay import RelayServer, engine_methods
        from vllm_wt.testing.engines import greedy_tokens, start_llm

        checkpoint = self._folder / "v0"
        save_checkpoint(random_model(self._shape, seed=0), checkpoint)
        self._screen.doing("starting a vLLM engine (25 to 40 s on two cores)")
        began = time.perf_counter()
        llm = start_llm(
            checkpoint, self._shape.dtype, self._arguments.backend, tp=self._arguments.tp
        )
        self._llm = llm
        self._previous = greedy_tokens(llm, self._prompts, _NEW_TOKENS)
        self._screen.say(
            f"engine: tensor parallel {self._arguments.tp}, backend {self._arguments.backend}, "
            f"started in {time.perf_counter() - began:.0f} s"
        )
        if self._previous != reference_tokens(checkpoint, self._prompts, _NEW_TOKENS):
            self._screen.say("the engine disagrees with transformers before any push")
            return 1
        methods = engine_methods(LocalClient(llm)) | {"hello": self._hello, "report": self._report}
        server = RelayServer(self._folder / "engine.sock", methods)
        self._screen.doing("starting the trainer")
        try:
            code = self._train()
        finally:
            server.close()
        if code != 0:
            self._screen.say(f"the trainer failed with exit code {code}")
        self._screen.say(f"{self._verified} of {self._arguments.rounds} rounds verified")
        return self.exit_code(code)

    def exit_code(self, trainer_code: int) -> int:
        """0 only when the trainer ended well and every round was verified."""
        return int(trainer_code != 0 or self._verified != self._arguments.rounds)

    def _train(self) -> int:
        import torch

        config = {
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "folder": str(self._folder),
            "backend": self._arguments.backend,
            "rounds": self._arguments.rounds,
            "shape": asdict(self._shape),
        }
        trainer = subprocess.Popen(
            [sys.executable, "-m", "vllm_wt.cli.demo_trainer", json.dumps(config)],
            stdout=subprocess.DEVNULL,  # UCX logs there
        )
        try:
            return trainer.wait(_TRAINER_S)
        finally:
            trainer.kill()
            trainer.wait(10)

    def _hello(self, facts: dict[str, Any]) -> None:
        self._screen.say(
            f"trainer: process {facts['pid']} (engine: {os.getpid()}), "
            f"`import vllm` there: {facts['import_vllm']}"
        )

    def _report(self, report: dict[str, Any]) -> None:
        from vllm_wt.testing.engines import greedy_tokens

        tokens = greedy_tokens(self._llm, self._prompts, _NEW_TOKENS)
        checkpoint = self._folder / f"v{report['version']}"
        expected = reference_tokens(checkpoint, self._prompts, _NEW_TOKENS)
        # Equal tokens prove nothing when the old weights give the same.
        right = tokens == expected and tokens != self._previous
        version = getattr(self._llm, "get_weight_version", None)  # vLLM 0.27 and later
        report["engine_version"] = version() if version else None
        report["verified"] = right and report["engine_version"] in {None, str(report["version"])}
        self._verified += report["verified"]
        self._previous = tokens
        self._screen.round(report, self._arguments.rounds)


class _Screen:
    """A progress bar on a terminal, plain lines elsewhere, JSON lines on request."""

    def __init__(self, as_json: bool, rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        self._json = as_json
        self._stdout = os.dup(1)
        self._console = Console(stderr=as_json, soft_wrap=True, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds)

    def __enter__(self) -> _Screen:
        if self._json:
            os.dup2(2, 1)  # vLLM's workers and UCX write to stdout too
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def doing(self, text: str) -> None:
        """What is going on now."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self.say(text + " ...")

    def round(self, report: dict[str, Any], rounds: int) -> None:
        self._progress.update(self._task, completed=report["version"], description="syncing")
        if self._json:
            os.write(self._stdout, json.dumps(report).encode() + b"\n")
            return
        stages = "  ".join(
            f"{name} {1000 * report[f'{name}_s']:.1f} ms"
            for name in ("gather", "wire", "verify", "load")
        )
        rate = report["nbytes"] / max(report["wire_s"], 1e-9) / 1e9
        mark = "verified" if report["verified"] else "NOT VERIFIED"
        self.say(
            f"round {report['version']}/{rounds}  {report['tensors']} tensors  "
            f"{report['nbytes'] / 1e6:.1f} MB  {stages}  {rate:.2f} GB/s  "
            f"pause {1000 * report['pause_s']:.1f} ms  version {report['version']}  {mark}"
        )
