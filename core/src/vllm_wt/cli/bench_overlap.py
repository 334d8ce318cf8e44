"""``vllm-wt bench overlap``: what requests see of a sync while a real engine serves them.

The trainer is another process, and the wire is as slow as a network's. What is measured is how long the
engine stands still, beyond what a pause with nothing in it costs, and whether it generates meanwhile.
On a CPU weights are plain parameters, as on a GPU, by a switch that is there for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from vllm_wt.cli.bench_model import save_config
from vllm_wt.cli.bench_result import machine, positive, report
from vllm_wt.cli.plan import require_vllm, stdout_kept
from vllm_wt.errors import EngineError

_BOUND = 1.5
"""The most of the time of one flat copy that a sync may add to an empty pause."""
_TOKENS_BOUND = 0.5
"""The least part of its tokens a second that the engine must make during a pull."""
_WIRE_MB_S = 200
_REQUESTS = 4
"""In flight at any time."""
_NEW_TOKENS = 96
_WARM_UP = 1
"""Rounds that touch all memory."""
_TRAINER_S = 3600.0
_BACKEND = "rdma"


def add_parser(names: Any) -> None:
    overlap = names.add_parser(
        "overlap",
        help="the pause of a sync into an engine that serves, on a CPU",
        description="A trainer pushes into an engine that generates all the time, over a wire of "
        f"{_WIRE_MB_S} MB/s: the pause beyond an empty one against one flat copy of the same bytes, "
        "and the tokens that are made during the pull.",
    )
    overlap.add_argument(
        "--megabytes", type=positive, default=400, help="about, and 156 or more (%(default)s)"
    )
    overlap.add_argument("--rounds", type=positive, default=7, help="default: %(default)s")
    overlap.add_argument("--json", action="store_true", help="nothing but the JSON object")
    overlap.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a bound is missed, or the weights are not right.

    Raises:
        BackendUnavailable: vLLM is not installed.
        EngineError: The trainer failed.
    """
    require_vllm("What is measured is a sync into an engine of vLLM's")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of the engine's process
    with tempfile.TemporaryDirectory(prefix="vllm-wt-bench-") as folder, stdout_kept():
        save_config(Path(folder), arguments.megabytes, max_position_embeddings=512)
        rounds, facts = asyncio.run(_Bench(Path(folder), arguments.rounds).run())
        gc.collect()  # vLLM's engine object: its destructor does not work once the interpreter ends
    result = _result(rounds, facts)
    details = result["details"]
    summary = (
        f"{details['megabytes']:.0f} MB at {details['wire_mb_s']:.0f} MB/s: a sync adds "
        f"{result['value']:.1f} ms to an empty pause of {details['empty_ms']:.1f} ms, one flat copy "
        f"{result['baseline']:.1f} ms, ratio {result['ratio']:.2f} (at most {_BOUND}); "
        f"{details['tokens_s_during']:.1f} tokens/s during the pull, {details['tokens_s_before']:.1f} "
        f"before, {details['tokens_ratio']:.2f} (at least {_TOKENS_BOUND})"
    )
    return report(result, summary, json_only=arguments.json)


def _result(rounds: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """What all rounds come to."""
    paused_s, copy_s = [r["paused_s"] for r in rounds], [r["copy_s"] for r in rounds]
    empty_s = [statistics.median(r["empty_s"]) for r in rounds]
    added_s = [pause - empty for pause, empty in zip(paused_s, empty_s, strict=True)]
    ratio = round(statistics.median(added_s) / statistics.median(copy_s), 3)
    before, during = ([r[f"tokens_s_{when}"] for r in rounds] for when in ("before", "during"))
    kept = round(statistics.median(d / b for d, b in zip(during, before, strict=True)), 3)
    nbytes = rounds[0]["nbytes"]
    checked = all(r["right"] for r in rounds)
    stages = {stage: _ms(r["stages"][stage] for r in rounds) for stage in rounds[0]["stages"]}
    return {
        "name": "overlap",
        "value": _ms(added_s),
        "baseline": _ms(copy_s),
        "unit": "ms",
        "ratio": ratio,
        "bound": _BOUND,
        "ok": ratio <= _BOUND and kept >= _TOKENS_BOUND and checked,
        "samples": {
            "ours_s": added_s,
            "baseline_s": copy_s,
            "paused_s": paused_s,
            "empty_s": [r["empty_s"] for r in rounds],
            "tokens_s_before": before,
            "tokens_s_during": during,
        },
        "details": {
            "megabytes": round(nbytes / 1e6, 1),
            "checked": checked,
            "paused_ms": _ms(paused_s),
            "empty_ms": _ms(empty_s),
            # What follows a pause of either kind: the KV cache of all requests is computed anew.
            "to_next_token_ms": _ms(r["stall_s"] for r in rounds),
            "to_next_token_empty_ms": _ms(statistics.median(r["empty_stall_s"]) for r in rounds),
            # `load` and `confirm` each call the worker; the second has nothing to do there. `stop`
            # has a wait for the end of a step, which is not counted as pause.
            "stages_ms": stages,
            "wire_mb_s": round(
                nbytes / statistics.median(r["stages"]["wire"] for r in rounds) / 1e6, 1
            ),
            "tokens_s_before": round(statistics.median(before), 2),
            "tokens_s_during": round(statistics.median(during), 2),
            "tokens_ratio": kept,
            "tokens_bound": _TOKENS_BOUND,
            "requests": _REQUESTS,
            **facts,
            **machine(),
        },
    }


def _ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


class _Bench:
    """The engine, requests that keep it busy, and a trainer that reports rounds.

    Args:
        folder: Has the model's configuration; sockets go there.
        rounds: To be measured.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self._folder = folder
        self._count = rounds
        self._rounds: list[dict[str, Any]] = []
        self._engine: Any = None
        self._stopping = False
        self._arrived: list[tuple[float, int]] = []
        """When tokens came, and how many."""
        self._changed = threading.Condition()

    async def run(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The measured rounds, and what they depend on."""
        import torch
        from vllm import __version__ as release

        from vllm_wt.sources.checkpoint import manifest_of
        from vllm_wt.testing.engines import start_async_llm
        from vllm_wt.testing.throttled import RATE

        os.environ[RATE] = str(_WIRE_MB_S)  # for the worker
        manifest = manifest_of(self._folder)
        self._engine = start_async_llm(
            self._folder,
            "bfloat16",
            _BACKEND,
            load_format="dummy",
            max_model_len=512,
            worker_extension_cls="vllm_wt.cli.bench_overlap_worker.OverlapWorker",
        )
        requests = asyncio.gather(*(self._serve(index) for index in range(_REQUESTS)))
        trainer = asyncio.create_task(self._train(manifest))
        both: list[asyncio.Future[Any]] = [trainer, requests]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if trainer.done():
                await (
                    trainer
                )  # if it failed, the engine may be paused, and no request end by itself
                self._stopping = True
            await requests
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            self._engine.shutdown()
            self._engine = None
        facts = {"tensors": len(manifest), "vllm": release, "torch": torch.__version__}
        return self._rounds[_WARM_UP:], facts

    async def _train(self, manifest: Any) -> None:
        from vllm_wt.clients.local import AsyncLocalClient
        from vllm_wt.clients.relay import RelayServer, engine_methods

        loop = asyncio.get_running_loop()
        client = AsyncLocalClient(self._engine, loop)
        own: dict[str, Callable[..., Any]] = {
            "report": self._report,
            "tokens": self._wait_for_tokens,
            "flat_copy": lambda nbytes: self._of_worker(loop, "wt_flat_copy", nbytes),
            "sha256": lambda: self._of_worker(loop, "wt_sha256"),
        }
        config = {
            "folder": str(self._folder),
            "backend": _BACKEND,
            "rounds": _WARM_UP + self._count,
            "tensors": [[each.name, each.dtype, each.shape] for each in manifest.tensors],
        }
        with ExitStack() as stack:
            for name, methods in (("engine", engine_methods(client)), ("bench", own)):
                path = self._folder / f"{name}.sock"
                stack.enter_context(closing(RelayServer(path, methods)))
            trainer = subprocess.Popen(
                [sys.executable, "-m", "vllm_wt.cli.bench_overlap_trainer", json.dumps(config)],
                stdout=subprocess.DEVNULL,  # UCX logs there
            )
            stack.callback(trainer.wait, 10)
            stack.callback(trainer.kill)
            code = await asyncio.to_thread(trainer.wait, _TRAINER_S)
        if code:
            raise EngineError(
                "The trainer's process failed",
                where="trainer",
                expected="exit code 0",
                got=code,
                cure="see what it printed",
            )

    def _of_worker(self, loop: asyncio.AbstractEventLoop, method: str, *args: Any) -> Any:
        coroutine = self._engine.collective_rpc(method, args=args)
        (answer,) = asyncio.run_coroutine_threadsafe(coroutine, loop).result()
        return answer

    def _wait_for_tokens(self, count: int) -> None:
        """Until as many more have come."""
        with self._changed:
            first = len(self._arrived)
            self._changed.wait_for(lambda: sum(n for _, n in self._arrived[first:]) >= count)

    def _report(self, facts: dict[str, Any]) -> None:
        with self._changed:
            arrived = list(self._arrived)
        for when in ("before", "during"):
            first, last = facts[when]
            tokens = sum(count for at, count in arrived if first <= at < last)
            facts[f"tokens_s_{when}"] = tokens / (last - first)

        def stall(began: float, resumed: float) -> float:
            return next(at for at, _ in arrived if at > resumed) - began

        (began, resumed), empty = facts["paused"], facts["empty"]
        facts |= {
            "paused_s": resumed - began,
            "empty_s": [last - first for first, last in empty],
            "stall_s": stall(began, resumed),
            "empty_stall_s": [stall(*each) for each in empty],
        }
        self._rounds.append(facts)

    async def _serve(self, index: int) -> None:
        """One request after another, for as long as the trainer pushes."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=_NEW_TOKENS + 16 * index,  # so that they don't begin and end together
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        number = 0
        while not self._stopping:
            prompt = {"prompt_token_ids": [1 + index, *range(1, 8)]}
            async for output in self._engine.generate(prompt, params, f"{index}-{number}"):
                with self._changed:
                    self._arrived.append((time.monotonic(), len(output.outputs[0].token_ids)))
                    self._changed.notify_all()
            number += 1
