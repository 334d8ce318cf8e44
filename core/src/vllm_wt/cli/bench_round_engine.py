"""The engines of ``vllm-wt bench round``: started, asked and ended, one at a time."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_wt.cli.bench_round_checksums import checksums
from vllm_wt.cli.bench_round_model import MODELS, TrainerWeights
from vllm_wt.errors import EngineError, Timeout, WeightTransferError
from vllm_wt.testing.engines import start_llm
from vllm_wt.testing.models import ModelShape, prompts

_ENGINE_S = 600.0
"""Seconds from an engine's start to its end."""
_NEW_TOKENS, _TOP = 16, 5
"""Tokens that an engine makes of each prompt, and how many likely ones are compared of each."""
_GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    "max_num_seqs": 8,
}
_LOG_LINES = 150


@dataclass(frozen=True)
class Seen:
    """What an engine does and holds.

    Args:
        logprobs: Of greedy continuations, by prompt and position; the token's own first.
        checksums: Of parameters and buffers by name.
    """

    logprobs: list[list[list[tuple[int, float]]]]
    checksums: dict[str, str]


class RoundEngine:
    """A running engine, and what is asked of it.

    Args:
        llm: The engine; its worker has the methods of `bench_round_worker.RoundWorker`.
        model: Which model it runs.
    """

    def __init__(self, llm: Any, model: str) -> None:
        self.llm = llm
        self._model = model

    @property
    def graphs(self) -> bool:
        """Whether vLLM says that it has captured CUDA graphs."""
        mode = self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        return mode is not None and mode.name != "NONE"

    def rpc(self, method: str, *args: Any) -> Any:
        (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def require_watched(self, weights: TrainerWeights) -> None:
        """What changes every round is in the model as the trainer has it.

        Raises:
            EngineError: It is not: the round did less than it said.
        """
        expected = checksums(weights.watched)
        found = self.rpc("wt_checksums", list(expected))
        if found != expected:
            raise EngineError(
                "A round has ended, and the model does not have its weights",
                where="the worker",
                expected="parameters with the checksums of the trainer's",
                got=f"others: {[name for name in expected if found[name] != expected[name]]}",
                cure="its figures mean nothing: find out which step of the round did not happen",
            )

    def look(self) -> Seen:
        """One request at a time: bf16 sums differ between batches."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=_NEW_TOKENS,
            logprobs=_TOP,
            ignore_eos=True,
            detokenize=False,
        )
        logprobs = []
        for ids in prompts(ModelShape(vocab=MODELS[self._model]["vocab_size"])):
            (answer,) = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            logprobs.append(
                [
                    [(int(token), float(entry.logprob)) for token, entry in position.items()]
                    for position in answer.outputs[0].logprobs
                ]
            )
        return Seen(logprobs, self.rpc("wt_checksums"))


@contextmanager
def running_engine(
    model: str, folder: Path, backend: str, *, graphs: bool, **overrides: Any
) -> Iterator[RoundEngine]:
    """An engine from its start to its end, when its memory is free again.

    Args:
        model: Which.
        folder: Its configuration, and its weights or not.
        backend: Name of an installed backend.
        graphs: Whether it captures CUDA graphs.
        overrides: Further arguments of ``LLM``.
    """
    settings: dict[str, Any] = (_GRAPHS if graphs else {}) | overrides
    with _bounded(_ENGINE_S):
        llm = start_llm(
            folder,
            "bfloat16",
            backend,
            worker_extension_cls="vllm_wt.cli.bench_round_worker.RoundWorker",
            **settings,
        )
        engine = RoundEngine(llm, model)
        try:
            yield engine
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm, engine.llm
            gc.collect()  # its destructor does not work once the interpreter ends


@contextmanager
def logged(log: Path) -> Iterator[None]:
    """What this process prints, and those that it starts, goes to a file, from below Python too.

    Its last lines are shown after a failure.

    Raises:
        EngineError: For an error that is none of ours.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    failed = True
    try:
        yield
        failed = False
    except WeightTransferError:
        raise
    except Exception as error:
        raise EngineError(
            "The engine failed, or what asked it",
            got=f"{type(error).__name__}: {error}",
            cure="see the lines of its log above",
        ) from error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if failed:
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print(*lines, sep="\n", file=sys.stderr)


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """An alarm on the main thread: vLLM never answers some calls in which its engine dies."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Timeout(
            "The engine did not get to its end",
            expected=f"within {seconds:g} s",
            cure="look for an engine that hangs or has died, in the lines of its log above",
        )

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
