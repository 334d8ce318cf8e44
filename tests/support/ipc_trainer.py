"""What the tests of the backend `ipc` share: trainer processes, and engines that they push to.

Run as a script it forks trainers, as wt_trainer.py does; of these it has other calls: weights in shared
memory or not, that move or are written to between two pushes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.modules["vllm"] = None  # type: ignore[assignment]  # the trainer must do without

import torch
from forking import fork_for_each_line
from trainers import Trainer
from wt_faults import resources

from vllm_wt.clients.relay import RelayClient, RelayServer, engine_methods
from vllm_wt.deadline import Deadline
from vllm_wt.errors import from_text
from vllm_wt.reports import WorkerReport, decoded
from vllm_wt.session import WeightSync
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

BACKEND = "ipc"
NEW_TOKENS = 8
SCALED = "model.layers.0.mlp.down_proj.weight"
"""The parameter that a test writes to, or replaces, by itself."""
_PR_SET_PDEATHSIG = 1
LONG_CYCLES = 200_000_000
"""About a tenth of a second of a CUDA stream that does nothing else."""


# -- in the trainer's process --------------------------------------------------------------------


class Session:
    """The calls that a test can make."""

    def __init__(self, folder: Path, shape: ModelShape, device: str) -> None:
        self._folder = folder
        self._model = random_model(shape, seed=0).to(device)
        self._saved = itertools.count()
        self._sync: WeightSync | None = None
        self.done = threading.Event()

    # Where the weights are.

    def share(self, every: int = 1) -> None:
        """Put every so many'th parameter into shared memory."""
        for param in list(self._model.parameters())[::every]:
            param.share_memory_()

    def move(self, how: str) -> None:
        """One parameter gets other memory, of the same kind: by ``.data``, or by a new Parameter."""
        module, _, name = SCALED.rpartition(".")
        owner = self._model.get_submodule(module)
        old = getattr(owner, name)
        new = old.detach().clone()
        if old.is_shared() and not old.is_cuda:
            new.share_memory_()
        if how == "data":
            old.data = new
        elif how == "replaced":
            setattr(owner, name, torch.nn.Parameter(new))
        else:
            raise ValueError(how)

    def move_into_block(self, mib: int) -> None:
        """One parameter goes to the start of an allocation of its own, of so many MiB."""
        param = self._model.get_parameter(SCALED)
        block = torch.zeros(
            (mib << 20) // param.element_size(), dtype=param.dtype, device=param.device
        )
        place = block[: param.numel()].view(param.shape)
        param.data = place.copy_(param.detach())

    def addresses(self) -> list[int]:
        """Of all parameters."""
        return [param.data_ptr() for param in self._model.parameters()]

    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    # What they hold.

    def randomize(self, seed: int, save: bool = True) -> str:
        """New weights; the folder of a checkpoint with them."""
        randomize(self._model, seed)
        folder = self._folder / f"seed{seed}"
        if save and not folder.exists():
            save_checkpoint(self._model, folder)
        return str(folder)

    def scale(self, factor: float) -> None:
        """Write to one parameter, in place."""
        with torch.no_grad():
            self._model.get_parameter(SCALED).mul_(factor)

    def scale_late(self, factor: float, times: int) -> bool:
        """The same on a CUDA stream that is busy for some time yet; whether it still is."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(times):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_CYCLES)
                self.scale(factor)
        return not stream.query()

    def save(self) -> str:
        """The folder of a checkpoint with the current weights."""
        folder = self._folder / f"saved-{os.getpid()}-{next(self._saved)}"
        save_checkpoint(self._model, folder)
        return str(folder)

    def spoil_digests_once(self) -> None:
        """The next push publishes digests of other bytes than its memory has."""
        side = self._side()
        original = side._signal

        def signal_late(word: int, number: int) -> None:
            side._signal = original
            side._digests.add_(1)
            original(word, number)

        side._signal = signal_late

    def die_in_push(self) -> None:
        """The next push ends the process, before the workers may read."""
        self._side()._signal = lambda word, number: os.kill(os.getpid(), signal.SIGKILL)

    # The session.

    def connect(
        self,
        deadline_s: float = 60.0,
        url: str | None = None,
        options: dict[str, Any] | None = None,
        idle: bool = False,
        *,
        by: Callable[..., WeightSync] = WeightSync.connect,
    ) -> None:
        """As of wt_trainer.py."""
        engine: Any = url or RelayClient(self._folder / "engine.sock")
        if idle:
            engine.idle_between_calls = True
        self._sync = by(
            engine, backend=BACKEND, source=self._model, deadline_s=deadline_s, **(options or {})
        )

    def reconnect(self, *arguments: Any) -> None:
        """The same, with an engine whose trainer lives."""
        self.connect(*arguments, by=WeightSync.reconnect)

    def push(self, version: int, deadline_s: float = 60.0) -> dict[str, Any]:
        assert self._sync is not None
        return asdict(self._sync.push(version, deadline_s=deadline_s))

    def describe(self, deadline_s: float) -> dict[str, Any]:
        """The init info for an engine that has to find this trainer by itself."""
        return self._side().describe(Deadline(deadline_s)).to_wire()

    def export(self) -> None:
        """A handle that nobody opens."""
        self.describe(30.0)

    def generation(self) -> int:
        return int(self._side().generation)

    def torn(self) -> bool:
        assert self._sync is not None
        return self._sync.status()[0].torn

    def disconnect(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _side(self) -> Any:
        assert self._sync is not None
        return self._sync._trainer

    # What the process holds.

    def resources(self) -> dict[str, int]:
        return resources()

    def device_segments(self) -> int:
        """Allocations of CUDA's that torch has cut its tensors from."""
        return len(torch.cuda.memory_snapshot())

    def device_memory(self, reset: bool = False) -> dict[str, int]:
        return device_memory(reset)

    def free_device_memory(self) -> int:
        """Of the whole device, with nothing cached by this process."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def device_memory(reset: bool) -> dict[str, int]:
    """Bytes of the device that this process has allocated, and the most since the last reset."""
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}


def _main(folder: str, name: str, shape: dict[str, Any], device: str) -> None:
    # It ends with the process that forked it, whichever way the tests end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    session = Session(Path(folder), ModelShape(**shape), device)
    names = [name for name in vars(Session) if not name.startswith("_")]
    server = RelayServer(Path(folder) / name, {each: getattr(session, each) for each in names})
    session.done.wait()
    server.close()


# -- in the test's -------------------------------------------------------------------------------


class _Forker:
    """The process that forks trainers; it ends with this one, whose end closes its input."""

    def __init__(self, environment: Sequence[tuple[str, str]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment),
        )

    def fork(self, *arguments: Any) -> int:
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


_forker = lru_cache(maxsize=8)(_Forker)


class IpcTrainer(Trainer):
    """A trainer process; see `Session` for its calls.

    Args:
        folder: Of the engine's socket and of checkpoints.
        shape: Of its model.
        device: Of the same.
        environment: What it has beyond this process's, from its start on.
    """

    def __init__(
        self, folder: Path, shape: ModelShape, device: str = "cpu", **environment: str
    ) -> None:
        name = f"trainer-{uuid.uuid4().hex[:8]}.sock"
        forker = _forker(tuple(sorted(environment.items())))
        self.pid = forker.fork(str(folder), name, asdict(shape), device)
        self._path = folder / name
        self._client: RelayClient | None = None


class IpcEngine:
    """A vLLM engine that IPC trainers reach over a socket, and what a test asks of it.

    Args:
        folder: For the socket, ``engine.sock``, and for checkpoints.
        shape: Of its model, whose weights are those of seed 0.
        tp: Tensor-parallel size.
    """

    def __init__(self, folder: Path, shape: ModelShape, tp: int) -> None:
        from vllm_wt.clients.local import LocalClient
        from vllm_wt.testing.engines import start_llm

        self.folder = folder
        self.shape = shape
        self.tp = tp
        self.prompts = prompts(shape, count=3)
        self._nonces = itertools.count()
        save_checkpoint(random_model(shape, seed=0), folder / "seed0")
        self.llm = start_llm(
            folder / "seed0",
            shape.dtype,
            BACKEND,
            tp=tp,
            worker_extension_cls="wt_faults.FaultExtension",
        )
        self.client = LocalClient(self.llm)
        self.before: dict[str, Callable[[], None]] = {}
        """What comes before the next call of a name."""
        self._lock = threading.RLock()  # an LLM takes one call at a time
        methods = {name: self._guarded(name, m) for name, m in engine_methods(self.client).items()}
        self._server = RelayServer(folder / "engine.sock", methods)
        self._trainers: list[IpcTrainer] = []
        self._spare = IpcTrainer(folder, shape)  # comes up while a test runs
        self.fresh = self.digests()
        """Of an engine that has loaded the checkpoint of seed 0 as any engine does."""

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in self.before:
                self.before.pop(name)()
            with self._lock:
                return method(*args)

        return call

    def trainer(self) -> IpcTrainer:
        trainer, self._spare = self._spare, IpcTrainer(self.folder, self.shape)
        self._trainers.append(trainer)
        trainer.wait_ready()
        return trainer

    def call(self, method: str, *args: Any) -> None:
        """One of vLLM's own methods, with the typed error that a client makes of its text."""
        try:
            with self._lock:
                getattr(self.client, method)(*args)
        except Exception as error:
            raise from_text(str(error), where=method) from error

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        with self._lock:
            answers: list[Any] = self.llm.collective_rpc(method, args=args)
        return answers

    def tokens(self) -> list[list[int]]:
        from vllm_wt.testing.engines import greedy_tokens

        with self._lock:
            return greedy_tokens(self.llm, self.prompts, NEW_TOKENS)

    def reference(self, checkpoint: str | Path) -> list[list[int]]:
        """What transformers generates from a checkpoint."""
        return reference_tokens(Path(checkpoint), self.prompts, NEW_TOKENS)

    def digests(self) -> list[dict[str, str]]:
        """vLLM's own digests of every rank's parameters, and ours of buffers, too."""
        return [*self.rpc("compute_weight_checksums"), *self.rpc("wt_digests")]

    def state(self) -> list[dict[str, Any]]:
        return self.rpc("wt_state")

    def reports(self) -> tuple[WorkerReport, ...]:
        with self._lock:
            return decoded(self.client.reports(), where="reports")

    def facts(self, name: str) -> list[Any]:
        """What each worker says of where it receives."""
        return [report.facts[name] for report in self.reports()]

    def resources(self) -> list[dict[str, int]]:
        return self.rpc("wt_resources")

    def pids(self) -> list[int]:
        return [worker["pid"] for worker in self.resources()]

    def trainers_memory(self) -> list[int]:
        """How many maps each worker has of memory that the backend, or torch, has made to be shared."""
        names = (OWN_MEMORY, TORCHS_MEMORY)
        return [sum(len(maps_of(pid, name)) for name in names) for pid in self.pids()]

    def assert_in_step(self) -> None:
        """Every rank answers this very call, is idle and whole, and calls itself healthy."""
        nonce = str(next(self._nonces))
        assert self.rpc("wt_echo", nonce) == [[rank, nonce] for rank in range(self.tp)]
        states = self.state()
        assert [state["torn"] for state in states] == [False] * self.tp
        assert [state["meta"] for state in states] == [[]] * self.tp
        self.rpc("check_health")

    def close_trainers(self) -> None:
        self.before = {}
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def close(self) -> None:
        self.close_trainers()
        self._spare.close()
        self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


_shared: dict[int, IpcEngine] = {}


def shared_engine(folder: Callable[[str], Path], tp: int) -> IpcEngine:
    """One that all modules of this process share: it takes half a minute to start.

    A head of its own at TP 1; at TP 2 one that is tied to the embedding and padded.
    """
    if tp not in _shared:
        cores = "|".join(str(rank) for rank in range(tp))
        with patch.dict(os.environ, VLLM_CPU_OMP_THREADS_BIND=cores):
            shape = ModelShape(vocab=500, tied=tp == 2)
            _shared[tp] = IpcEngine(folder(f"ipc-tp{tp}"), shape, tp)
    return _shared[tp]


def close_shared_engines() -> None:
    while _shared:
        _shared.popitem()[1].close()


@contextmanager
def ipc_server(folder: Path, shape: ModelShape) -> Iterator[Any]:
    """A real HTTP server with this backend, as of `servers`."""
    from servers import HttpEngine

    from vllm_wt.testing.servers import start_server

    save_checkpoint(random_model(shape, seed=0), folder / "seed0")
    with start_server(
        folder / "seed0",
        shape.dtype,
        BACKEND,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0"},
        extra_args=["--worker-extension-cls", "wt_faults.FaultExtension"],
    ) as server:
        yield HttpEngine(server, folder, shape, 1)


OWN_MEMORY = "memfd:vllm-wt-ipc"
"""In the name of memory that the backend has made."""
TORCHS_MEMORY = "/torch_"
"""In the name of memory of ``share_memory_``."""

Place = tuple[str, int]
"""Device and inode of the file behind a map."""


def maps_of(pid: int, name: str = "") -> list[tuple[int, int, Place]]:
    """Shared memory that a process has mapped: first and last address, and what is behind it."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, mode, _, device, inode, *path = line.split(maxsplit=5)
        if inode != "0" and "s" in mode and name in (path[0] if path else ""):
            first, last = (int(each, 16) for each in addresses.split("-"))
            found.append((first, last, (device, int(inode))))
    return found


def places_of(pid: int, addresses: Sequence[int]) -> set[Place | None]:
    """What is behind addresses of a process; None for private memory."""
    maps = maps_of(pid)
    return {
        next((place for first, last, place in maps if first <= address < last), None)
        for address in addresses
    }


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Look again and again; fail when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.02)


if __name__ == "__main__":
    # Imported, and nothing computed: threads that compute do not survive a fork.
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: F401

    fork_for_each_line(_main)
