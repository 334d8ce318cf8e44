"""Starts the processes of a check, and drives a trainer and workers as core does."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_wt import registry
from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.spec import BackendSpec
from vllm_wt.testing.conformance.content import digests
from vllm_wt.testing.conformance.process import MOMENTS_S, BrokenContract, Forker, Process

LONG_S = 20.0
"""Deadline where nothing should be waited for."""
SHORT_S = 1.0
"""Deadline where something is waited for in vain."""
CHECK_S = 180.0
"""Deadline of a whole check."""
_START_S = 5.0
_POLL_S = 0.002
_AGREEMENT_S = 45.0
"""Seconds beyond its deadline that core gives the workers of a step to agree."""


class EndpointProcess(Process):
    """A process with a Transport; see `endpoint.Endpoint` for its methods.

    Args:
        title: Whose it is.
        deadline: For all its calls together.
        backend: Whose Transport.
        device: Of its buffers.
        name: Of the endpoint.
        serve: Whether a thread calls ``progress``.
        transport: Which of the backend's Transports; empty for the default.
    """

    def __init__(
        self,
        forker: Forker,
        title: str,
        deadline: Deadline,
        *,
        backend: str,
        device: str,
        name: str,
        serve: bool,
        transport: str = "",
    ) -> None:
        super().__init__(
            forker,
            "endpoint",
            f"{title}, {name}",
            deadline,
            backend=backend,
            name=name,
            device=device,
            serve=serve,
            transport=transport,
        )
        self.name = name

    def start_anew(self, sizes: list[int]) -> None:
        """Close the transport; a new one, under a name of its own, with a zeroed ``arena``."""
        self.close(within=LONG_S)
        self.renew(new_name("reader"))
        self.hold("arena", sizes)


class Harness:
    """What a check works with; everything that it starts ends with it.

    Derive from it to run the kit where a backend needs something, and name the class in
    `BackendConformance.harness_cls`.

    Args:
        backend: Name of the backend, as `vllm-wt list` shows it.
        forker: Where processes come from.
        device: torch device of all memory.
    """

    options: dict[str, Any] = {}  # noqa: RUF012
    """Options for the trainer's side of the backend."""
    transport: str = ""
    """Which of the backend's Transports; empty for the default."""

    def __init__(self, backend: str, forker: Forker, *, device: str = "cpu") -> None:
        self.backend = backend
        self.device = device
        self._forker = forker
        self._deadline = Deadline(CHECK_S)
        self._processes: list[Process] = []
        self._others: list[Harness] = []
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-wt-")

    @cached_property
    def spec(self) -> BackendSpec:
        """What the backend says of itself."""
        return registry.default().get(self.backend).spec

    @property
    def entry_point(self) -> str:
        """The module that the entry point names."""
        points = metadata.entry_points(group=registry.GROUP, name=self.spec.name)
        return next(iter(points)).value.partition(":")[0]

    def on(self, device: str) -> Harness:
        """The same backend in another kind of memory; it ends with this one."""
        other = type(self)(self.backend, self._forker, device=device)
        other.transport = self.transport
        self._others.append(other)
        return other

    def package(self) -> Process:
        """A process that looks at the backend's classes."""
        process = Process(
            self._forker,
            "package",
            "the package",
            self._deadline,
            backend=self.backend,
            transport=self.transport,
        )
        self._processes.append(process)
        return process

    # -- transports ----------------------------------------------------------------------------

    def owner(self, sizes: list[int] | None = None, seed: int = 1) -> EndpointProcess:
        """An owner that serves; with ``sizes``, holding ``weights`` of these sizes."""
        owner = self._endpoint("the owner", serve=True)
        if sizes is not None:
            owner.hold("weights", sizes, seed)
        return owner

    def reader(self, sizes: list[int] | None = None) -> EndpointProcess:
        """A reader; with ``sizes``, holding a zeroed ``arena``."""
        reader = self._endpoint("the reader", serve=False)
        if sizes is not None:
            reader.hold("arena", sizes)
        return reader

    def connected(
        self, nbytes: int = 100_000, seed: int = 1
    ) -> tuple[EndpointProcess, EndpointProcess]:
        """An owner of one buffer, exposed as generation 1; a reader with a ``plan`` for all of it."""
        owner, reader = self.apart(nbytes, seed)
        self.connect(reader, owner, 1, [nbytes])
        return owner, reader

    def apart(self, nbytes: int, seed: int = 1) -> tuple[EndpointProcess, EndpointProcess]:
        """An owner with ``weights`` and a reader with an ``arena`` of one buffer, not connected."""
        owner, reader = self.owner(), self.reader()  # made at the same time
        owner.hold("weights", [nbytes], seed)
        reader.hold("arena", [nbytes])
        return owner, reader

    def reader_of(
        self, owner: EndpointProcess, generation: int, sizes: list[int], key: str = "weights"
    ) -> EndpointProcess:
        """A reader with a ``plan`` for all of what an owner exposes as ``generation``."""
        reader = self.reader(sizes)
        self.connect(reader, owner, generation, sizes, key)
        return reader

    def connect(
        self,
        reader: EndpointProcess,
        owner: EndpointProcess,
        generation: int,
        sizes: list[int],
        key: str = "weights",
    ) -> None:
        """Open, and prepare a ``plan`` for all of it."""
        handle = owner.expose(key, generation)
        reader.open(owner.name, generation, handle, LONG_S, within=LONG_S + MOMENTS_S)
        copies = [[owner.name, i, 0, i, 0, nbytes] for i, nbytes in enumerate(sizes)]
        reader.prepare("plan", "arena", copies)

    def _endpoint(self, title: str, *, serve: bool) -> EndpointProcess:
        process = EndpointProcess(
            self._forker,
            title,
            self._deadline,
            backend=self.backend,
            device=self.device,
            name=new_name(title),
            serve=serve,
            transport=self.transport,
        )
        self._processes.append(process)
        return process

    # -- syncs ---------------------------------------------------------------------------------

    def trainer(
        self, kind: str = "few", seed: int = 1, *, in_place: bool = False, **options: Any
    ) -> Process:
        """A trainer's process; see `content` for the kinds of tensors, `trainer` for the rest."""
        of_transport = {"transport": self.transport} if self.transport else {}
        trainer = Process(
            self._forker,
            "trainer",
            "the trainer",
            self._deadline,
            backend=self.backend,
            device=self.device,
            kind=kind,
            seed=seed,
            options={**of_transport, **self.options, **options},
            in_place=in_place,
        )
        self._processes.append(trainer)
        return trainer

    def workers(self, count: int = 1) -> list[Process]:
        """The workers of one engine."""
        meeting = str(Path(self._folder.name) / uuid.uuid4().hex)
        workers = []
        for rank in range(count):
            worker = Process(
                self._forker,
                "worker",
                f"worker {rank}",
                self._deadline,
                backend=self.backend,
                device=self.device,
                rank=rank,
                size=count,
                meeting=meeting,
            )
            self._processes.append(worker)
            workers.append(worker)
        at_once(workers, "join", _AGREEMENT_S)
        return workers

    def sync(
        self, workers: int = 1, kind: str = "few", seed: int = 1, *, in_place: bool = False
    ) -> Sync:
        """A trainer and an engine, connected."""
        trainer = self.trainer(kind, seed, in_place=in_place)
        sync = Sync(trainer, self.workers(workers), kind)
        sync.connect()
        return sync

    def close(self) -> None:
        for other in self._others:
            other.close()
        for process in self._processes:
            process.end()
        self._folder.cleanup()


class Sync:
    """A trainer and the workers of one engine, driven as `vllm_wt.delivery` drives them.

    Args:
        trainer: Its process.
        workers: Theirs, by rank.
        kind: Of the trainer's tensors.
    """

    def __init__(self, trainer: Process, workers: list[Process], kind: str = "few") -> None:
        self.trainer = trainer
        self.workers = workers
        self.kind = kind
        self.version = 0
        self._known = 0

    @property
    def worker(self) -> Process:
        """The only one, or the first."""
        return self.workers[0]

    def connect(self, seconds: float = LONG_S) -> None:
        """Describe, and init on every worker, while the trainer serves."""
        info = self.trainer.describe(seconds, within=seconds + MOMENTS_S)
        self._known = self.trainer.generation()
        self.trainer.serve()
        try:
            self.on_workers("init", seconds, info)
        finally:
            self.trainer.pause()

    def push(self, seconds: float = LONG_S) -> None:
        """A whole round, of the values that the trainer has now."""
        self.begin(seconds)
        try:
            self.open(seconds)
            self.await_delivery(seconds)
            self.step("seal", seconds)
            self.on_workers("finish", seconds)
        except WeightTransferError:
            with suppress(WeightTransferError):  # the one that is under way is to be told
                self.trainer.withdraw()
                self.step("abort", seconds)
            raise
        finally:
            self.trainer.pause()

    def begin(self, seconds: float = LONG_S) -> None:
        """A round with the values that the trainer has now; it serves from here on."""
        self.publish(seconds)
        self.on_workers("start", _START_S)
        self.trainer.serve()

    def give_up(self) -> None:
        """A round that is opened and given up."""
        self.begin()
        self.open()
        self.trainer.withdraw()
        self.step("abort")
        self.pause_after_failure()

    def pause_after_failure(self) -> None:
        """The trainer serves no more; one that was still sending may say why it could not go on."""
        with suppress(WeightTransferError):
            self.trainer.pause()

    def publish(self, seconds: float = LONG_S) -> None:
        self.version += 1
        self.trainer.publish(self.version, seconds, len(self.workers), within=seconds + MOMENTS_S)

    def open(self, seconds: float = LONG_S) -> None:
        self.step("open", seconds)
        self._known = self.trainer.generation()

    def step(self, op: str, seconds: float = LONG_S) -> None:
        """One ``update_weights`` on every worker."""
        info = self.trainer.update_info(op, seconds, self._known, within=seconds + MOMENTS_S)
        self.on_workers("update", seconds, info)

    def await_delivery(self, seconds: float = LONG_S) -> None:
        """Until the trainer says that every worker has everything, or a worker that it failed."""
        poll = self.trainer.update_info("poll", seconds, self._known)

        def delivered() -> bool:
            self.on_workers("update", seconds, poll)
            return bool(self.trainer.delivered() >= len(self.workers))

        until(delivered, seconds, "the trainer does not hear that all workers have everything")

    def on_workers(self, method: str, seconds: float, *args: Any) -> None:
        """Call a method of every worker at the same time."""
        at_once(self.workers, method, seconds + _AGREEMENT_S, *args)

    def wrong(self, seed: int) -> str | None:
        """How what a worker was loaded with differs from the tensors of a seed; None if not at all."""
        expected = digests(self.kind, seed)
        for rank, worker in enumerate(self.workers):
            loaded = worker.weights(within=LONG_S)
            others = sorted(
                name for name in {*expected, *loaded} if expected.get(name) != loaded.get(name)
            )
            if others:
                few = f"{others[:5]}{' and more' if len(others) > 5 else ''}"
                return f"{len(others)} of {len(expected)} tensors of rank {rank} are wrong: {few}"
        return None


def at_once(processes: list[Process], method: str, within: float, *args: Any) -> list[Any]:
    """Call a method of several processes at the same time; their answers.

    Raises:
        WeightTransferError, BrokenContract: The last one's, after all have answered.
    """
    calls = [process.begin(method, within, *args) for process in processes]
    answers: list[Any] = []
    failed: Exception | None = None
    for call in calls:
        try:
            answers.append(call.result())
        except (WeightTransferError, BrokenContract) as error:
            failed = error
    if failed is not None:
        raise failed
    return answers


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition.

    Raises:
        BrokenContract: It has not become true; ``what`` says so.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise BrokenContract(f"within {seconds:g} s {what}")
        time.sleep(_POLL_S)


def new_name(title: str) -> str:
    """Of an endpoint; no other has it."""
    return f"{title.rsplit(maxsplit=1)[-1]}-{uuid.uuid4().hex[:8]}"
