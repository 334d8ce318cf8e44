"""A real vLLM engine on a GPU, and trainers on the same GPU in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayClient, RelayServer, engine_methods
from vllm_wt.errors import PeerDead
from vllm_wt.testing.models import ModelShape, prompts, random_model, save_checkpoint

SUPPORT = Path(__file__).parent / "support"
NEW_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """How an engine runs."""

    dtype: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.dtype}-{'graphs' if self.graphs else 'eager'}"


class Trainer:
    """A trainer process; every call is answered by it or raises its error."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        name = f"trainer-{uuid.uuid4().hex[:8]}.sock"
        self._path = folder / name
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(SUPPORT / "gpu_trainer.py"),
                str(folder),
                name,
                json.dumps(asdict(shape)),
            ],
            stdout=subprocess.DEVNULL,  # UCX logs there
        )
        self._client: RelayClient | None = None

    def wait_ready(self) -> Trainer:
        """Until it answers: importing torch takes it seconds."""
        for _ in range(1200):
            try:
                self._client = RelayClient(self._path)
                return self
            except PeerDead:
                if self._process.poll() is not None:
                    raise
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)
        raise AssertionError("the trainer process did not come up")

    def call(self, method: str, *args: Any) -> Any:
        assert self._client is not None
        return self._client.call(method, *args)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def close(self) -> None:
        self.kill()
        if self._client is not None:
            self._client.close()


class Engine:
    """A vLLM engine and what a test asks of it.

    Args:
        folder: For the socket and for checkpoints.
        setting: How it runs.
        checkpoint: What it loads; random weights by default.
    """

    def __init__(self, folder: Path, setting: Setting, checkpoint: Path | None = None) -> None:
        from vllm_wt.testing.engines import start_llm

        self.folder = folder
        self.setting = setting
        # The vocabulary is padded; bfloat16 has a tied head too.
        tied = setting.dtype == "bfloat16"
        self.shape = ModelShape(hidden=256, layers=4, vocab=2000, tied=tied, dtype=setting.dtype)
        self.prompts = prompts(self.shape, count=3)
        if checkpoint is None:
            checkpoint = folder / "seed0"
            save_checkpoint(random_model(self.shape, seed=0), checkpoint)
        self.llm = start_llm(
            checkpoint,
            setting.dtype,
            "rdma",
            enforce_eager=not setting.graphs,
            max_num_seqs=8,
            worker_extension_cls="wt_gpu.GpuExtension",
        )
        self._lock = threading.RLock()  # an LLM takes one call at a time
        client = LocalClient(self.llm)
        methods = {name: self._guarded(m) for name, m in engine_methods(client).items()}
        self._server = RelayServer(folder / "engine.sock", methods)
        self._trainers: list[Trainer] = []

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

    def trainer(self) -> Trainer:
        self._trainers.append(Trainer(self.folder, self.shape))
        return self._trainers[-1].wait_ready()

    def tokens(self) -> list[list[int]]:
        from vllm_wt.testing.engines import greedy_tokens

        with self._lock:
            return greedy_tokens(self.llm, self.prompts, NEW_TOKENS)

    def rpc(self, method: str) -> Any:
        """Call a method of the one worker."""
        with self._lock:
            (answer,) = self.llm.collective_rpc(method)
        return answer

    def close_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def close(self) -> None:
        self.close_trainers()
        self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


SETTINGS = [Setting("float32", graphs=False), Setting("float32", True), Setting("bfloat16", True)]


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def shared_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    support = [str(SUPPORT), str(SUPPORT.parents[1] / "e2e" / "support")]
    patch = pytest.MonkeyPatch()
    for path in support:
        patch.syspath_prepend(path)
    python_path = os.pathsep.join(filter(None, [*support, os.environ.get("PYTHONPATH")]))
    patch.setenv("PYTHONPATH", python_path)
    patch.setenv("UCX_NET_DEVICES", "lo")
    engine = Engine(tmp_path_factory.mktemp("engine"), request.param)
    yield engine
    engine.close()
    patch.undo()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.close_trainers()


@pytest.fixture
def fresh(engine: Engine, tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    """Starts another engine of the same setting, which loads a checkpoint as any engine does."""
    started: list[Engine] = []

    def start(checkpoint: str) -> Engine:
        started.append(Engine(tmp_path, engine.setting, Path(checkpoint)))
        return started[-1]

    yield start
    for other in started:
        other.close()
