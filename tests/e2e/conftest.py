"""A real vLLM engine in this process, and trainers in processes of their own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from servers import HttpEngine, http_engine
from trainers import Trainer

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.errors import from_text
from vllm_wt.testing.engines import greedy_tokens, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    reference_tokens,
    save_checkpoint,
)

NEW_TOKENS = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two processes share the tests, those of an `LLM` run in one, of servers in the other."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker(
            "xdist_group"
        ):
            item.add_marker(pytest.mark.xdist_group("engines"))


class Engine:
    """A vLLM engine and what a test asks of it."""

    def __init__(self, folder: Path, shape: ModelShape, tp: int, backend: str = "rdma") -> None:
        self.folder = folder
        self.shape = shape
        self.tp = tp
        self._nonces = itertools.count()
        self._prompts = prompts(shape, count=3)
        checkpoint = folder / "seed0"
        save_checkpoint(random_model(shape, seed=0), checkpoint)
        self.llm = start_llm(
            checkpoint, shape.dtype, backend, tp=tp, worker_extension_cls="wt_faults.FaultExtension"
        )
        self.client = LocalClient(self.llm)
        self.before: dict[str, Callable[[], None]] = {}
        self._lock = threading.RLock()  # an LLM takes one call at a time
        methods = {name: self._guarded(name, m) for name, m in engine_methods(self.client).items()}
        self._server = RelayServer(folder / "engine.sock", methods)
        self._trainers: list[Trainer] = []
        self._spare = Trainer(folder, shape)  # comes up while a test runs

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in self.before:
                self.before.pop(name)()
            with self._lock:
                return method(*args)

        return call

    @property
    def target(self) -> Any:
        """What ``WeightSync.connect`` takes."""
        return self.llm

    def call(self, method: str, *args: Any) -> None:
        """One of vLLM's own methods, with the typed error that a client makes of its text."""
        try:
            with self._lock:
                getattr(self.client, method)(*args)
        except Exception as error:
            raise from_text(str(error), where=method) from error

    def init(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        with self._lock:
            answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def trainer(self) -> Trainer:
        trainer, self._spare = self._spare, Trainer(self.folder, self.shape)
        self._trainers.append(trainer)
        return trainer.wait_ready()

    def tokens(self) -> list[list[int]]:
        with self._lock:
            return greedy_tokens(self.llm, self._prompts, NEW_TOKENS)

    def reference(self, checkpoint: str | Path) -> list[list[int]]:
        """What transformers generates from a checkpoint."""
        return reference_tokens(Path(checkpoint), self._prompts, NEW_TOKENS)

    def checksums(self) -> list[dict[str, str]]:
        """vLLM's own digests of every rank's parameters."""
        return self.rpc("compute_weight_checksums")

    def state(self) -> list[dict[str, Any]]:
        return self.rpc("wt_state")

    def fail_once(self, phase: str, rank: int) -> None:
        self.rpc("wt_fail_once", phase, rank)

    def assert_in_step(self) -> None:
        """Every rank answers this very call, and the engine calls itself healthy."""
        nonce = str(next(self._nonces))
        answers = self.rpc("wt_echo", nonce)
        assert answers == [[rank, nonce] for rank in range(self.tp)]
        ranks = [{key.split(":")[3] for key in digests} for digests in self.checksums()]
        assert ranks == [{f"tp{rank}"} for rank in range(self.tp)]
        self.rpc("check_health")

    def close_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def close(self) -> None:
        self.close_trainers()
        self._spare.close()
        self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


def _make_engine(
    folder: Path, shape: ModelShape, tp: int, backend: str = "rdma"
) -> Iterator[Engine]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in range(tp)))
    engine = Engine(folder, shape, tp, backend)
    try:
        yield engine
    finally:
        engine.close()
        patch.undo()


class Engines:
    """Engines that tests share, an `LLM` or a server at TP 1 or 2, started when first asked for."""

    def __init__(self, folder: Callable[[str], Path], stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._made: dict[tuple[str, int], Any] = {}

    def get(self, kind: str, tp: int) -> Any:
        """Of kind ``llm``, ``http``, or ``nccl`` and ``sharded``: an `LLM` with that backend."""
        if (kind, tp) not in self._made:
            llm = contextmanager(_make_engine)
            own = {name: partial(llm, backend=name) for name in ("nccl", "sharded")}
            make = {"llm": llm, "http": http_engine, **own}[kind]
            # A head of its own at TP 1, one that is tied to the embedding and padded at TP 2.
            shape = ModelShape(vocab=500, tied=tp == 2 or kind == "nccl")
            self._made[kind, tp] = self._stack.enter_context(make(self._folder(kind), shape, tp))
        return self._made[kind, tp]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path_factory.mktemp, stack)


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def shared_engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    engine: Engine = engines.get("llm", request.param)
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.close_trainers()


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(1, marks=[pytest.mark.xdist_group("servers"), pytest.mark.slow]),
        pytest.param(2, marks=pytest.mark.xdist_group("servers")),
    ],
    ids=["tp1", "tp2"],
)
def shared_server(request: pytest.FixtureRequest, engines: Engines) -> HttpEngine:
    server: HttpEngine = engines.get("http", request.param)
    return server


@pytest.fixture
def server(shared_server: HttpEngine) -> Iterator[HttpEngine]:
    yield shared_server
    shared_server.close_trainers()


@pytest.fixture(
    scope="session",
    params=[
        ("llm", 1),
        ("llm", 2),
        pytest.param(("http", 1), marks=[pytest.mark.xdist_group("servers"), pytest.mark.slow]),
        pytest.param(("http", 2), marks=pytest.mark.xdist_group("servers")),
    ],
    ids=["tp1", "tp2", "http-tp1", "http-tp2"],
)
def host(request: pytest.FixtureRequest, engines: Engines) -> Any:
    """An engine of either kind: ``target``, ``call``, ``tokens``, ``checksums``, ``assert_in_step``."""
    return engines.get(*request.param)


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., Iterator[Engine]]:
    """For a test that needs one of its own: ``yield from make_engine(shape, tp=1)``."""
    return partial(_make_engine, tmp_path)
