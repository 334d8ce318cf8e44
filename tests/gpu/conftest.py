"""A real vLLM engine on a GPU, and trainers on the same GPU in processes of their own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trainers import Trainer

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.errors import from_text
from vllm_wt.testing.models import ModelShape, prompts, random_model, save_checkpoint

NEW_TOKENS = 16

# For vLLM's workers too, which import their extension from here.
HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))


@dataclass(frozen=True)
class Setting:
    """How an engine runs."""

    dtype: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.dtype}-{'graphs' if self.graphs else 'eager'}"


class Served:
    """A vLLM engine that trainers in other processes reach over a socket.

    Args:
        folder: For the socket, ``engine.sock``.
        checkpoint: What it loads.
        dtype: Its dtype.
        backend: By which it gets weights.
        overrides: Further arguments of ``LLM``.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        dtype: str,
        backend: str = "rdma",
        **overrides: Any,
    ) -> None:
        from vllm_wt.testing.engines import start_llm

        self.folder = folder
        self.llm = start_llm(checkpoint, dtype, backend, **overrides)
        self._lock = threading.RLock()  # an LLM takes one call at a time
        self._client = LocalClient(self.llm)
        methods = {name: self._guarded(m) for name, m in engine_methods(self._client).items()}
        self._server = RelayServer(folder / "engine.sock", methods)

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                return method(*args)

        return call

    @property
    def graphs(self) -> bool:
        """Whether vLLM says that it runs CUDA graphs."""
        config = self.llm.llm_engine.vllm_config.compilation_config
        return config.cudagraph_mode is not None and config.cudagraph_mode.name != "NONE"

    def logprobs(
        self, prompt_ids: list[list[int]], new_tokens: int, top: int
    ) -> list[list[dict[int, float]]]:
        """Of each token of greedy continuations, and of the most likely others."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            logprobs=top,
            ignore_eos=True,
            detokenize=False,
        )
        answers = []
        for ids in prompt_ids:  # one request at a time so that batching cannot differ
            with self._lock:
                (request,) = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            answers.append(
                [
                    {int(token): float(entry.logprob) for token, entry in position.items()}
                    for position in request.outputs[0].logprobs
                ]
            )
        return answers

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the one worker."""
        with self._lock:
            (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def close(self) -> None:
        self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


class Engine(Served):
    """An engine of a small model and what a test asks of it.

    Args:
        folder: For the socket and for checkpoints.
        setting: How it runs.
        checkpoint: What it loads; random weights by default.
        backend: By which it gets weights.
    """

    tp = 1

    def __init__(
        self,
        folder: Path,
        setting: Setting,
        checkpoint: Path | None = None,
        backend: str = "rdma",
    ) -> None:
        self.setting = setting
        self.backend = backend
        # The vocabulary is padded; bfloat16 has a tied head too.
        tied = setting.dtype == "bfloat16"
        self.shape = ModelShape(hidden=256, layers=4, vocab=2000, tied=tied, dtype=setting.dtype)
        self.prompts = prompts(self.shape, count=3)
        if checkpoint is None:
            checkpoint = folder / "seed0"
            save_checkpoint(random_model(self.shape, seed=0), checkpoint)
        super().__init__(
            folder,
            checkpoint,
            setting.dtype,
            backend,
            enforce_eager=not setting.graphs,
            max_num_seqs=8,
            worker_extension_cls="wt_faults.FaultExtension",
        )
        self._trainers: list[Trainer] = []

    def trainer(self) -> Trainer:
        self._trainers.append(Trainer(self.folder, self.shape, "cuda"))
        return self._trainers[-1].wait_ready()

    def call(self, method: str, *args: Any) -> None:
        """One of vLLM's own methods, with the typed error that a client makes of its text."""
        try:
            with self._lock:
                getattr(self._client, method)(*args)
        except Exception as error:
            raise from_text(str(error), where=method) from error

    def init(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def tokens(self) -> list[list[int]]:
        from vllm_wt.testing.engines import greedy_tokens

        with self._lock:
            return greedy_tokens(self.llm, self.prompts, NEW_TOKENS)

    def close_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def close(self) -> None:
        self.close_trainers()
        super().close()


SETTINGS = [Setting("float32", graphs=False), Setting("float32", True), Setting("bfloat16", True)]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def shared_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """By the module's ``BACKEND``, with its ``ENVIRONMENT``."""
    backend = getattr(request.module, "BACKEND", "rdma")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in getattr(request.module, "ENVIRONMENT", {}).items():
            patch.setenv(name, value)
        engine = Engine(tmp_path_factory.mktemp("engine"), request.param, backend=backend)
        yield engine
        engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.close_trainers()


@pytest.fixture
def fresh(engine: Engine, tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    """Starts another engine of the same setting, which loads a checkpoint as any engine does."""
    started: list[Engine] = []

    def start(checkpoint: str) -> Engine:
        started.append(Engine(tmp_path, engine.setting, Path(checkpoint), engine.backend))
        return started[-1]

    yield start
    for other in started:
        other.close()


@pytest.fixture(scope="session")
def serve() -> type[Served]:
    """Starts an engine on a checkpoint; whoever starts it closes it."""
    return Served
