"""``vllm-wt demo``: a trainer process pushes new weights into a real vLLM engine, verified."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_wt import registry
from vllm_wt.cli.demo_engines import DemoEngine, EngineOptions, LlmEngine, ServerEngine
from vllm_wt.errors import BackendUnavailable
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    reference_tokens,
    save_checkpoint,
)

if TYPE_CHECKING:
    from types import FrameType

_NEW_TOKENS = 16
_TRAINER_S = 600.0
"""Seconds that the trainer's process may take for everything."""
_LEAST_VOCAB = 16
"""With fewer tokens, different weights soon generate the same."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("demo", help="sync a random model into a real vLLM engine")
    parser.add_argument("--backend", default="rdma", help="default: %(default)s")
    parser.add_argument(
        "--server", action="store_true", help="the engine is vLLM's HTTP server, not an LLM"
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--tp", type=_positive, default=1, help="tensor-parallel size (%(default)s)"
    )
    parser.add_argument("--hidden", type=_positive, default=256, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=_positive, default=4, help="layers (%(default)s)")
    parser.add_argument("--vocab", type=_positive, default=2048, help="vocabulary (%(default)s)")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    parser.add_argument("--json", action="store_true", help="one JSON object a round")
    parser.add_argument(
        "--log", metavar="FILE", help="the trainer's own line of JSON for each round, appended"
    )
    parser.set_defaults(run=partial(run, parser))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _require_shape(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with the reason when no such model can be made, or none that proves anything."""
    if arguments.vocab < _LEAST_VOCAB:
        parser.error(
            f"argument --vocab: {arguments.vocab} is less than {_LEAST_VOCAB}: too few tokens to "
            "tell new weights from old ones"
        )
    if arguments.hidden % 64:
        parser.error(
            f"argument --hidden: {arguments.hidden} is not a multiple of 64: the model has "
            "hidden/32 attention heads and hidden/64 key-value heads"
        )
    key_value_heads = arguments.hidden // 64
    if key_value_heads % arguments.tp:
        parser.error(
            f"argument --tp: {arguments.tp} workers cannot share the {2 * key_value_heads} "
            f"attention heads (hidden/32) and {key_value_heads} key-value heads (hidden/64) "
            f"evenly; --hidden {64 * arguments.tp} would do"
        )


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Exit code 0 only when every round was verified."""
    _require_shape(parser, arguments)
    registry.default().get(arguments.backend)
    if importlib.util.find_spec("vllm") is None:
        raise BackendUnavailable(
            "The demo starts a vLLM engine, and vLLM is not installed",
            cure="pip install vllm (or run `make demo` in a checkout)",
        )
    # For the engine's log: of its start-up only errors are about the demo.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    shape = ModelShape(arguments.hidden, arguments.layers, arguments.vocab, arguments.tied)
    with (
        _stoppable(),
        tempfile.TemporaryDirectory(prefix="vllm-wt-demo-") as folder,
        _Screen(arguments.json, arguments.rounds) as screen,
    ):
        return _Demo(arguments, shape, Path(folder), screen).run()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with 128 + their number, after it has cleaned up."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the cleaning up
        raise SystemExit(128 + number)

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Demo:
    """Starts an engine and a trainer, and compares what the engine generates after each round."""

    def __init__(
        self, arguments: argparse.Namespace, shape: ModelShape, folder: Path, screen: _Screen
    ) -> None:
        self._arguments = arguments
        self._shape = shape
        self._folder = folder
        self._screen = screen
        self._prompts = prompts(shape)
        self._engine: DemoEngine
        self._previous: list[list[int]] = []
        self._verified = 0

    def run(self) -> int:
        checkpoint = self._folder / "v0"
        save_checkpoint(random_model(self._shape, seed=0), checkpoint)
        self._screen.doing("starting a vLLM engine (25 to 40 s on two cores)")
        began = time.perf_counter()
        arguments = self._arguments
        engine_cls = ServerEngine if arguments.server else LlmEngine
        options = EngineOptions(
            folder=str(self._folder),
            checkpoint=str(checkpoint),
            dtype=self._shape.dtype,
            backend=arguments.backend,
            tp=arguments.tp,
        )
        with closing(engine_cls(options)) as engine:
            self._engine = engine
            self._screen.say(
                f"engine: {engine_cls.title}, process {engine.pid}, tensor parallel "
                f"{arguments.tp}, backend {arguments.backend}, "
                f"started in {time.perf_counter() - began:.0f} s"
            )
            return self._rounds(checkpoint)

    def _rounds(self, checkpoint: Path) -> int:
        from vllm_wt.clients.relay import RelayServer

        self._previous = self._engine.tokens(self._prompts, _NEW_TOKENS)
        if self._previous != reference_tokens(checkpoint, self._prompts, _NEW_TOKENS):
            self._screen.say("the engine disagrees with transformers before any push")
            return 1
        self._screen.doing("starting the trainer")
        methods = {"hello": self._hello, "report": self._report}
        with closing(RelayServer(self._folder / "demo.sock", methods)):
            code = self._train()
        if code != 0:
            self._screen.say(f"the trainer failed with exit code {code}")
            self._engine.check()
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
            "engine": self._engine.address,
            "backend": self._arguments.backend,
            "rounds": self._arguments.rounds,
            "log": self._arguments.log,
            "shape": asdict(self._shape),
        }
        trainer = subprocess.Popen(
            [sys.executable, "-m", "vllm_wt.cli.demo_trainer", json.dumps(config)],
            stdout=subprocess.DEVNULL,  # UCX logs there
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
        try:
            return trainer.wait(_TRAINER_S)
        finally:
            trainer.kill()
            trainer.wait(10)

    def _hello(self, facts: dict[str, Any]) -> None:
        self._screen.say(
            f"trainer: process {facts['pid']}, `import vllm` there: {facts['import_vllm']}"
        )

    def _report(self, report: dict[str, Any]) -> None:
        tokens = self._engine.tokens(self._prompts, _NEW_TOKENS)
        checkpoint = self._folder / f"v{report['version']}"
        expected = reference_tokens(checkpoint, self._prompts, _NEW_TOKENS)
        # Equal tokens prove nothing when the old weights give the same.
        right = tokens == expected and tokens != self._previous
        report["engine_version"] = self._engine.version()
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
        self._console = Console(stderr=as_json, soft_wrap=True, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            console=self._console,
            transient=True,
            redirect_stdout=False,  # the JSON lines
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=rounds)

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

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
            print(json.dumps(report), flush=True)
            return
        # The engine generates during all of it but the load.
        titles = {"gather": "gather", "wire": "wire", "verify": "verify", "load": "load (pause)"}
        stages = "  ".join(
            f"{title} {1000 * report[f'{name}_s']:.1f} ms" for name, title in titles.items()
        )
        rate = report["nbytes"] / max(report["wire_s"], 1e-9) / 1e9
        mark = "verified" if report["verified"] else "NOT VERIFIED"
        self.say(
            f"round {report['version']}/{rounds}  {report['tensors']} tensors  "
            f"{report['nbytes'] / 1e6:.1f} MB  {stages}  {rate:.2f} GB/s  "
            f"version {report['version']}  {mark}"
        )
