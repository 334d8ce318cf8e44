"""Trainer ranks and readers as processes, driven over relays.

One process imports what they all need, which takes seconds, and forks one of them for each line of its
input, answered by the number of the new process. It ends with its input.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from forking import fork_for_each_line
from wt_cases import Worker, bytes_of

from vllm_wt import WeightSync
from vllm_wt.clients.relay import RelayClient, RelayServer
from vllm_wt.errors import LoadError, WeightTransferError
from vllm_wt.pull.exposure import READY
from vllm_wt.source import as_source, take_part
from vllm_wt_rdma import nixl
from vllm_wt_rdma.transport import NixlTransport

LONG_S = 600.0
"""The timeout of the ranks' process group: a test that waits for it has failed by then."""
CALL_S = 5.0
"""Seconds that a trainer here gives an engine to answer, so that tests of stopped ones are short."""
WORK_S = 60.0
"""Seconds for the calls in which an engine has much to do; none of the tests stops one there."""
_WORK = {"init_weight_transfer_engine", "finish_weight_update"}

SHAPES = {
    "small": [
        (257, 33),
        (7,),
        (1,),
        (64, 700),
        (2, 3, 500),
        (1000, 11),
        (90, 257),
        (5, 0),
        (3000,),
    ],
    "large": [(2048, 1024)] * 38,
    "huge": [(40_000, 1024), (7,)],
}
"""Of the models; sizes that neither two nor three divides among them."""


def full_tensors(size: str, seed: int) -> dict[str, torch.Tensor]:
    """What the model holds: every rank takes its part of it, and the test compares with it."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for index, shape in enumerate(SHAPES[size]):
        if size in {"large", "huge"}:  # quick to make
            made[f"w{index}"] = torch.full(shape, float(seed * 1000 + index))
            continue
        tensor = torch.randn(shape, generator=generator)
        made[f"w{index}"] = tensor.bfloat16() if index % 3 == 1 else tensor
    return made


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


class Rank:
    """One rank of a trainer."""

    def __init__(self, rank: int, world: int, store: str, device: str = "cpu") -> None:
        from torch.distributed.device_mesh import init_device_mesh

        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=LONG_S),
        )
        self.rank, self.world = rank, world
        self.device = torch.device(device)
        self.mesh = init_device_mesh(device, (world,))
        self.sync: WeightSync | None = None
        self._outcome: dict[str, Any] = {}
        self._thread = threading.Thread()

    def make(self, kind: str, size: str, seed: int) -> None:
        """The model, sharded."""
        self.kind, self.size = kind, size
        full = full_tensors(size, seed)
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            self.source: Any = torch.nn.Module()
            for name in list(full):
                self.source.register_parameter(name, torch.nn.Parameter(full.pop(name)))
            fully_shard(self.source, mesh=self.mesh)
        else:
            self.source = {
                name: self._distributed(index, tensor)
                for index, (name, tensor) in enumerate(full.items())
            }

    def _distributed(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """By rows, by columns, whole on each rank, or not distributed but strided."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placement = self._placement(index, tensor)
        if placement is None:
            return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        if placement < 0:
            return DTensor.from_local(tensor, self.mesh, [Replicate()])
        local = self._part(tensor, placement)
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(
            local, self.mesh, [Shard(placement)], shape=shape, stride=stride, run_check=False
        )

    @staticmethod
    def _placement(index: int, tensor: torch.Tensor) -> int | None:
        kind = index % 5
        return (0, min(1, tensor.dim() - 1), -1, None, 0)[kind]

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = tensor.chunk(self.world, dim)
        if self.rank < len(parts):
            return parts[self.rank].contiguous()
        return tensor.narrow(dim, 0, 0).contiguous()

    def fill(self, seed: int) -> None:
        """Other values, in place."""
        own = dict(self.source.named_parameters()) if self.kind == "fsdp2" else self.source
        with torch.no_grad():
            for index, (name, tensor) in enumerate(full_tensors(self.size, seed).items()):
                dim = 0 if self.kind == "fsdp2" else self._placement(index, tensor)
                if not tensor.numel():
                    continue
                if dim is None:
                    own[name].copy_(tensor)
                else:
                    local = own[name].to_local()
                    local.copy_(tensor if dim < 0 else self._part(tensor, dim))

    def order(self) -> list[str]:
        """As they are walked, by all ranks together."""
        return [name for name, _ in as_source(self.source)]

    def take_part(self) -> None:
        take_part(self.source)

    def connect(self, path: str, bucket_nbytes: int, polls: bool = True) -> dict[str, Any]:
        self.close()
        self.sync = WeightSync.connect(
            Engine(path, polls), backend="rdma", source=self.source, bucket_nbytes=bucket_nbytes
        )
        trainer: Any = self.sync._trainer
        exposure = trainer._exposure
        return {
            "buckets": exposure.count,
            "packed": sorted(exposure.packed),
            "ring": sum(slot.numel() for slot in trainer._ring.slots),
            "slots": len(trainer._ring.slots),
        }

    def push(self, version: int, deadline_s: float) -> dict[str, int]:
        assert self.sync is not None
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = memory("VmRSS")
        self.sync.push(version, deadline_s=deadline_s)
        return {"before": before, "peak": memory("VmHWM"), "after": memory("VmRSS")}

    def ready(self) -> int:
        """Buckets of the last attempt that its readers can read."""
        assert self.sync is not None
        trainer: Any = self.sync._trainer
        word = int(trainer._signals[READY])
        return max(0, word - trainer._exposure.number(trainer._ticket, 0) + 1)

    def versions(self) -> list[Any]:
        assert self.sync is not None
        return [(status.version, status.torn) for status in self.sync.status()]

    def launch(self, method: str, *args: Any) -> None:
        """Call a method on a thread; :meth:`outcome` tells of it."""
        self._outcome = outcome = {}

        def run() -> None:
            try:
                result = getattr(self, method)(*args)
            except WeightTransferError as error:
                outcome.update(error=error.facts())
            except BaseException as error:
                outcome.update(error={"code": "not typed", "what": repr(error)})
            else:
                outcome.update(result=result)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def outcome(self) -> dict[str, Any] | None:
        """None while it runs."""
        return None if self._thread.is_alive() else self._outcome

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
            self.sync = None


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) << 10


class _Impatient(RelayClient):
    def _limit_s(self, method: str, args: tuple[Any, ...]) -> float:
        return WORK_S if method in _WORK else CALL_S


class Engine:
    """A client with a connection for each call, as the one over HTTP has it, and little patience.

    Without ``polls`` it stands in for an engine that answers while its worker has stopped.
    """

    def __init__(self, path: str, polls: bool) -> None:
        self._path = path
        self._polls = polls

    def _call(self, method: str, *args: Any) -> Any:
        client = _Impatient(self._path, timeout_s=WORK_S if method in _WORK else CALL_S)
        try:
            return client.call(method, *args)
        finally:
            client.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self._polls or update_info["op"] != "poll":
            self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def world_size(self) -> int:
        return 1


class Signalled(NixlTransport):
    """Signals its own thread as it is about to report a bucket: a fault at a certain place."""

    at: int | None = None
    number = signal.SIGSTOP
    reports = 0

    def notify(self, owner: str, ticket: int) -> None:
        cls = type(self)
        if cls.reports == cls.at:
            cls.at = None
            signal.pthread_kill(threading.get_ident(), cls.number)
        cls.reports += 1
        super().notify(owner, ticket)


class Reader(Worker):
    """The worker, and what a test does to it."""

    def __init__(self) -> None:
        super().__init__(transport_cls=Signalled)
        self._refuses: str | None = None

    def signal_at(self, bucket: int, number: int) -> None:
        """This process gets the signal when it has read this bucket of the next round."""
        Signalled.at, Signalled.number, Signalled.reports = bucket, signal.Signals(number), 0

    def refuse(self, step: str) -> None:
        """The next such call fails."""
        self._refuses = step

    def _call(self, name: str, step: Any, *args: Any) -> Any:
        if name == self._refuses:
            self._refuses = None
            step = _refuse
        return super()._call(name, step, *args)

    def digests(self) -> dict[str, list[Any]]:
        """What was committed: form and bytes."""
        return {
            name: [str(tensor.dtype), list(tensor.shape), digest_of(tensor)]
            for name, tensor in self.received.items()
        }


def _refuse(*args: Any) -> None:
    raise LoadError("The engine refuses", cure="ask again")


RANK_METHODS = (
    *("make", "fill", "order", "take_part", "connect", "push", "ready", "versions", "close"),
    *("launch", "outcome"),
)
READER_METHODS = (
    *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
    *("finish_weight_update", "signal_at", "refuse", "digests"),
)


def serve(path: str, target: Any, methods: tuple[str, ...]) -> None:
    """Until it is killed."""
    served: dict[str, Callable[..., Any]] = {name: getattr(target, name) for name in methods}
    RelayServer(path, served)
    threading.Event().wait()


def main(role: str, path: str, *args: Any) -> None:
    if role == "rank":
        serve(path, Rank(*args), RANK_METHODS)
    else:
        serve(path, Reader(), READER_METHODS)


def fork_processes() -> None:
    # Imported, and nothing computed: threads that compute do not survive a fork.
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    nixl.load()
    fork_for_each_line(main)


if __name__ == "__main__":
    fork_processes()
