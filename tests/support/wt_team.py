"""Ranks of a trainer that connect together, and engines of several workers, as processes.

Forked and driven as those of wt_ring.py are.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from forking import fork_for_each_line
from torch.distributed import FileStore
from wt_cases import Weights
from wt_ring import Rank, digest_of, full_tensors, serve

from vllm_wt import StoreGroup, WeightSync
from vllm_wt.beats import Beats
from vllm_wt.clients.relay import RelayClient
from vllm_wt.engine import WeightTransferEngine, WorkerContext
from vllm_wt.errors import LoadError, WeightTransferError, to_text
from vllm_wt.pull import PullEngine
from vllm_wt.ranks import Report
from vllm_wt.round import WorkerRound
from vllm_wt.source import Announced, StateDictSource
from vllm_wt.team import Team
from vllm_wt_ipc.transport import IpcTransport
from vllm_wt_rdma import nixl
from vllm_wt_rdma.transport import NixlTransport

TRANSPORTS: dict[str, type[Any]] = {"ipc": IpcTransport, "rdma": NixlTransport}


class Made(StateDictSource):
    """Its tensors are made one after another, on each rank by itself."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__(state)
        self.fails_at: str | None = None

    @property
    def made(self) -> frozenset[str]:
        return frozenset(self._state)

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._state.items():
            if name == self.fails_at:
                self.fails_at = None
                raise ValueError(f"{name} is not to be had")
            yield name, tensor.clone()


class TeamRank(Rank):
    """One rank; its kinds beyond `Rank`'s are of tensors that every rank has in full."""

    def make(self, kind: str, size: str, seed: int) -> None:
        if kind in {"fsdp2", "dtensor"}:
            super().make(kind, size, seed)
            return
        self.kind, self.size = kind, size
        self.tensors = full_tensors(size, seed)
        if kind == "shared":
            self.tensors = {name: each.share_memory_() for name, each in self.tensors.items()}
        self.source = self.tensors if kind != "made" else Made(self.tensors)

    def make_model(self, kind: str, shape: dict[str, Any]) -> None:
        """Weights that a real engine can load."""
        from torch.distributed.fsdp import fully_shard

        from vllm_wt.testing.models import ModelShape, random_model

        self.kind, self.shape = "model", ModelShape(**shape)
        self.source = random_model(self.shape, seed=0).to(self.device)
        if kind == "shared":
            self.source.share_memory()
        if kind == "fsdp2":
            fully_shard(self.source, mesh=self.mesh)

    def _fill_model(self, seed: int) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        from vllm_wt.testing.models import random_model, randomize

        full = random_model(self.shape, seed=0)
        randomize(full, seed)
        full.to(self.device)
        with torch.no_grad():
            for name, own in self.source.named_parameters():
                values = full.get_parameter(name)
                if isinstance(own, DTensor):
                    values = distribute_tensor(
                        values, self.mesh, own.placements, src_data_rank=None
                    )
                own.copy_(values)

    def fill(self, seed: int) -> None:
        if self.kind == "model":
            self._fill_model(seed)
            return
        if self.kind in {"fsdp2", "dtensor"}:
            super().fill(seed)
            return
        for name, tensor in full_tensors(self.size, seed).items():
            self.tensors[name].copy_(tensor)

    def move(self) -> None:
        """All tensors get other memory of the same kind."""
        for name, tensor in self.tensors.items():
            moved = tensor.clone()
            self.tensors[name] = moved.share_memory_() if self.kind == "shared" else moved

    def change(self, what: str) -> None:
        """Be another than the other ranks."""
        if what == "name":
            self.tensors["other"] = self.tensors.pop("w8")
        elif what == "dtype":
            self.tensors["w8"] = self.tensors["w8"].double()
        elif what == "announced":
            self.source = Announced(self.tensors)
        elif what == "no source":
            self.source = iter(())

    def fail_at(self, name: str) -> None:
        self.source.fails_at = name

    def connect_together(
        self,
        path: str,
        backend: str,
        options: dict[str, Any],
        deadline_s: float = 30.0,
        group: str = "all",
    ) -> None:
        self.close()
        self.sync = WeightSync.connect(
            _clients(path) if self.rank == 0 else None,
            backend=backend,
            source=self.source,
            group=self._group(group, path),
            deadline_s=deadline_s,
            **options,
        )

    def _group(self, kind: str, path: str) -> Any:
        if kind == "store":
            store = FileStore(f"{path}.store", self.world)
            return StoreGroup(store, self.rank, self.world)
        return {"all": torch.distributed.group.WORLD, "none": None, "wrong": 5}[kind]

    def push_together(self, version: Any, deadline_s: Any = 30.0) -> int:
        assert self.sync is not None
        return self.sync.push(version, deadline_s=deadline_s).version

    def wait_less(self, seconds: float) -> None:
        Team.grace_s = seconds

    def bear_silence(self, seconds: float) -> None:
        """Of other ranks, from the next connect on."""
        Beats.every_s, Beats.silence_s = seconds / 10, seconds

    def owner(self) -> str:
        assert self.sync is not None
        trainer: Any = self.sync._trainer
        return trainer._handle().owner

    def settled(self) -> int:
        """How many exchanges of outcomes this rank has made since the last call."""
        number, Counted.settled = Counted.settled, 0
        return number


class Counted:
    """Exchanges of a round's outcome, counted where a rank has a `Team`."""

    settled = 0

    @classmethod
    def install(cls) -> None:
        original = Team.exchange

        def exchange(self: Team, said: Any, deadline: Any, *, where: str) -> Any:
            cls.settled += where == "settle"
            return original(self, said, deadline, where=where)

        Team.exchange = exchange  # type: ignore[method-assign]


def _clients(paths: str) -> list[Any]:
    """Of engines, with commas between them."""
    clients: list[Any] = [RelayClient(path, timeout_s=20.0) for path in paths.split(",")]
    for client in clients:
        client.idle_between_calls = False
    return clients


class _Threads:
    """What the workers of one process agree by."""

    def __init__(self, rank: int, said: list[Report | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(said)
        self._said = said
        self._barrier = barrier

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        self._said[self.rank] = report
        self._barrier.wait(seconds)
        told = [each for each in self._said if each is not None]
        self._barrier.wait(seconds)
        return told


class TeamEngine:
    """An engine of several workers, each with the whole model; errors cross as text."""

    def __init__(self, backend: str, workers: int, tells: bool) -> None:
        said: list[Report | None] = [None] * workers
        barrier = threading.Barrier(workers)
        self._tells = tells
        self._models = [self._model(rank, workers) for rank in range(workers)]
        self.made: list[str] = []
        self.asked: list[str] = []
        self._refuses: str | None = None
        self._signals: tuple[str, int, int] | None = None
        self._rounds = []
        for rank, model in enumerate(self._models):
            context = WorkerContext(
                backend=backend, device=torch.device("cpu"), rank=rank, size=workers
            )
            engine = self._engine(context)
            self._rounds.append(WorkerRound(engine, model, _Threads(rank, said, barrier)))

    def _model(self, rank: int, workers: int) -> Weights:
        return Weights()

    def _engine(self, context: WorkerContext) -> WeightTransferEngine[Any, Any]:
        return PullEngine(context, _watched(TRANSPORTS[context.backend], self))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init", lambda each: each.init(init_info))

    def start_weight_update(self) -> None:
        self._all("start", lambda each: each.start())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all(update_info["op"], lambda each: each.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish", lambda each: each.finish())

    def world_size(self) -> int:
        return len(self._rounds)

    def reports(self) -> list[dict[str, Any]] | None:
        return [each.report() for each in self._rounds] if self._tells else None

    def facts(self) -> list[dict[str, Any]]:
        return [each.report() for each in self._rounds]

    def digests(self) -> list[dict[str, Any]]:
        """What each worker has committed."""
        return [
            {
                name: [str(tensor.dtype), list(tensor.shape), digest_of(tensor)]
                for name, tensor in model.received.items()
            }
            for model in self._models
        ]

    def calls(self) -> list[str]:
        """Those since the last look, and each connection that a worker has made."""
        asked, self.asked = self.asked, []
        return asked

    def refuse(self, step: str) -> None:
        """The next such call fails."""
        self._refuses = step

    def signal_at(self, step: str, pid: int, number: int) -> None:
        """A process gets the signal, and has taken it, before the next such call is made."""
        self._signals = (step, pid, number)

    def _all(self, name: str, step: Callable[[WorkerRound], Any]) -> None:
        self.asked.append(name)
        if name == self._refuses:
            self._refuses = None
            raise LoadError("The engine refuses", cure="ask again")
        if self._signals is not None and self._signals[0] == name:
            _, pid, number = self._signals
            self._signals = None
            os.kill(pid, number)
            while _runs(pid):
                time.sleep(0.005)
        errors: list[WeightTransferError] = []

        def run(each: WorkerRound) -> None:
            try:
                step(each)
            except WeightTransferError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(each,)) for each in self._rounds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(f"Worker failed with error '{to_text(errors[0])}'")


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # One whose first thread is dead may have others, which keep its sockets open.
    return text.rpartition(")")[2].split()[0] != "T"


def _watched(transport_cls: type[Any], engine: TeamEngine) -> type[Any]:
    class Watched(transport_cls):  # type: ignore[misc]
        def __init__(self, name: str, device: torch.device) -> None:
            super().__init__(name, device)
            engine.asked.append(f"connection {name.partition('.worker')[2][0]}")

    return Watched


RANK_METHODS = (
    *(
        "make",
        "make_model",
        "fill",
        "move",
        "change",
        "fail_at",
        "connect_together",
        "push_together",
        "close",
    ),
    *("wait_less", "owner", "settled", "launch", "outcome", "versions"),
)
ENGINE_METHODS = (
    *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
    *("finish_weight_update", "world_size", "reports", "digests", "facts", "calls", "refuse"),
    "signal_at",
)


def main(role: str, path: str, *args: Any) -> None:
    if role == "rank":
        Counted.install()
        serve(path, TeamRank(*args), RANK_METHODS)
    else:
        serve(path, TeamEngine(*args), ENGINE_METHODS)


if __name__ == "__main__":
    # Imported, and nothing computed: threads that compute do not survive a fork.
    import torch.distributed.fsdp
    import torch.distributed.tensor

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    nixl.load()
    fork_for_each_line(main)
