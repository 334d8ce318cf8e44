"""Faults in real rounds: a typed error in time, nothing left behind, and a next round that works.

Trainers and workers are processes, with the real `PullTrainer` and `PullEngine` and core's rounds, but
without vLLM. That an error comes in time is how long it is waited for: where a call takes longer, the
kit kills the process, and the test fails.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_wt.errors import (
    CorruptTransfer,
    ManifestMismatch,
    PeerDead,
    Revoked,
    Timeout,
    WeightTransferError,
)
from vllm_wt.info import Handle
from vllm_wt.testing.conformance.harness import LONG_S, Harness, Sync
from vllm_wt.testing.conformance.held import Held
from vllm_wt.testing.conformance.process import Ended, Forker

_SCRIPT = Path(__file__).with_name("drill_process.py")
DEADLINE_S = 10.0
"""Of rounds that are to fail for another reason."""
VAIN_S = 2.0
"""Of rounds that wait in vain."""
BEYOND_S = 2.0
"""Seconds beyond its deadline after which an error is too late."""
NOTHING = {
    "agents": 0,
    "registrations": 0,
    "memory": 0,
    "reads": 0,
    "peers": 0,
    "quarantine": 0,
    "threads": ["MainThread"],
}
"""What a worker holds after a round that has failed."""


class DrillForker(Forker):
    """Starts the drills' own processes.

    Args:
        transports: Those of UCX: ``all``, which reads by copies between processes, or ``tcp``, by which
            every byte needs the owner's help.
    """

    def __init__(self, transports: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-wt-")
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": transports, "UCX_NET_DEVICES": "lo"},
        )


@pytest.fixture(scope="module")
def forkers() -> Iterator[Callable[[str], DrillForker]]:
    made: dict[str, DrillForker] = {}

    def forker(transports: str) -> DrillForker:
        if transports not in made:
            made[transports] = DrillForker(transports)
        return made[transports]

    yield forker
    for each in made.values():
        each.close()


@pytest.fixture
def harness(
    forkers: Callable[[str], DrillForker], request: pytest.FixtureRequest
) -> Iterator[Harness]:
    harness = Harness("rdma", forkers(getattr(request, "param", "all")))
    yield harness
    harness.close()


both = pytest.mark.parametrize("harness", ["all", "tcp"], indirect=True)
moments = pytest.mark.parametrize(
    ("harness", "moment"), [("all", "landed"), ("tcp", "in flight")], indirect=["harness"]
)
"""Copies between processes are made within a call, and so are never in flight."""


def begin_held(sync: Sync, seconds: float, moment: str = "landed") -> None:
    """A round whose workers are in the middle of their reads."""
    for worker in sync.workers:
        worker.hold(moment)
    sync.begin(seconds)
    sync.open(seconds)
    for worker in sync.workers:
        worker.await_held(within=LONG_S)


def outcome(worker: Any, seconds: float) -> None:
    """The end of a receive, before its deadline is past by more than `BEYOND_S`."""
    worker.outcome(within=seconds + BEYOND_S)


def give_up(sync: Sync) -> None:
    """As `vllm_wt.delivery` does with a round that has failed."""
    sync.trainer.withdraw()
    sync.step("abort")
    sync.pause_after_failure()


def require_works_with(worker: Any, trainer: Any, seed: int, kind: str) -> None:
    """A trainer that connects, and a round of its own."""
    sync = Sync(trainer, [worker], kind)
    sync.connect()
    sync.push()
    assert sync.wrong(seed) is None


def require_next_round(sync: Sync, seed: int) -> None:
    """The next round of the same trainer and the same workers."""
    sync.trainer.write(seed, within=LONG_S)
    sync.push()
    assert sync.wrong(seed) is None


def complete(sync: Sync, seconds: float = LONG_S) -> None:
    """The rest of a round that is open."""
    sync.await_delivery(seconds)
    sync.step("seal", seconds)
    sync.on_workers("finish", seconds)
    sync.trainer.pause()


@both
@pytest.mark.parametrize("pushes", [0, 1])
def test_a_trainer_that_is_killed_before_the_read(harness: Harness, pushes: int) -> None:
    sync = harness.sync(kind="sizes")
    for _ in range(pushes):
        sync.push()
    sync.begin(DEADLINE_S)
    info = sync.trainer.update_info("open", DEADLINE_S, 1)
    sync.trainer.kill()
    sync.worker.update(info)
    with pytest.raises(PeerDead) as caught:
        outcome(sync.worker, DEADLINE_S)
    assert caught.value.backend == "rdma"
    assert sync.worker.holdings() == NOTHING
    require_works_with(sync.worker, harness.trainer("sizes", 8), 8, "sizes")


@moments
def test_a_trainer_that_is_killed_during_the_read(harness: Harness, moment: str) -> None:
    sync = harness.sync(kind="sizes")
    sync.push()
    before = sync.worker.holdings()
    begin_held(sync, DEADLINE_S, moment)
    sync.trainer.kill()
    sync.worker.let_go()
    with pytest.raises(PeerDead) as caught:
        outcome(sync.worker, DEADLINE_S)
    assert caught.value.backend == "rdma"
    assert sync.worker.holdings() == NOTHING
    require_works_with(sync.worker, harness.trainer("sizes", 8), 8, "sizes")
    assert sync.worker.holdings() == before


@both
def test_a_trainer_that_is_killed_after_the_read(harness: Harness) -> None:
    sync = harness.sync(kind="sizes")
    sync.begin(DEADLINE_S)
    sync.open(DEADLINE_S)
    outcome(sync.worker, DEADLINE_S)
    again, seal = (sync.trainer.update_info(op, DEADLINE_S, 1) for op in ("open", "seal"))
    before = sync.worker.holdings()
    sync.trainer.kill()
    sync.worker.update(seal)
    sync.worker.finish()
    assert sync.wrong(1) is None
    assert sync.worker.holdings() == before
    sync.worker.start()
    sync.worker.update(again | {"version": 2, "ticket": again["ticket"] + 2})
    with pytest.raises(PeerDead):
        outcome(sync.worker, DEADLINE_S)
    assert sync.worker.holdings() == NOTHING
    assert sync.wrong(1) is None
    require_works_with(sync.worker, harness.trainer("sizes", 8), 8, "sizes")


@moments
def test_a_worker_that_is_killed_during_the_read_harms_no_other(
    harness: Harness, moment: str
) -> None:
    trainer, engines = harness.trainer("sizes"), [harness.workers()[0] for _ in range(3)]
    sync = Sync(trainer, engines, "sizes")
    sync.connect()
    sync.push()
    of_trainer, of_others = trainer.holdings(), [engine.holdings() for engine in engines[1:]]
    held = Held(trainer, *engines[1:])
    begin_held(sync, DEADLINE_S, moment)
    victim = sync.workers.pop(0)
    victim.kill()
    for worker in sync.workers:
        worker.let_go()
    for worker in sync.workers:
        outcome(worker, DEADLINE_S)
    complete(sync)
    assert sync.wrong(1) is None
    for seed in (2, 3):
        require_next_round(sync, seed)
    assert trainer.holdings() == of_trainer
    assert [worker.holdings() for worker in sync.workers] == of_others
    held.require_no_more("a worker that was killed")
    require_works_with(harness.workers()[0], trainer, 3, "sizes")


ABORTED = (
    "UCX 1.23 mostly aborts an owner that goes on with several reads to answer, of a peer that "
    "has gone: "
    "`ucp_request.inl: Fatal: unexpected error: Endpoint timeout`"
)


@pytest.mark.parametrize("harness", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    "moment",
    [
        "landed",
        pytest.param(
            "in flight", marks=pytest.mark.xfail(reason=ABORTED, raises=Ended, strict=False)
        ),
    ],
)
def test_a_trainer_that_is_stopped_during_the_read_and_goes_on_too_late(
    harness: Harness, moment: str
) -> None:
    sync = harness.sync(kind="sizes")
    sync.push()
    before = sync.trainer.holdings(), sync.worker.holdings()
    begin_held(sync, VAIN_S, moment)
    sync.trainer.stop()
    sync.worker.let_go()
    with pytest.raises(Timeout):
        outcome(sync.worker, VAIN_S)
    assert sync.worker.holdings() == NOTHING
    sync.worker.fill(0)
    sync.trainer.go_on()
    give_up(sync)  # it has driven its fabric since
    assert sync.worker.not_filled(0) == 0
    require_next_round(sync, 2)
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before


def test_a_trainer_that_is_stopped_before_its_digests_are_made(harness: Harness) -> None:
    """By copies between processes, for which it is not needed; over TCP see `ABORTED`."""
    sync = harness.sync(kind="sizes")
    sync.push()
    before = sync.trainer.holdings(), sync.worker.holdings()
    sync.trainer.hold_digests()
    sync.begin(VAIN_S)
    sync.open(VAIN_S)
    sync.trainer.stop()
    with pytest.raises(Timeout):
        outcome(sync.worker, VAIN_S)
    assert sync.worker.holdings() == NOTHING
    sync.trainer.go_on()
    sync.trainer.make_digests()
    give_up(sync)
    require_next_round(sync, 2)
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before


@both
@pytest.mark.parametrize("when", ["before the digests", "after the digests"])
def test_memory_that_is_overwritten_during_the_read(harness: Harness, when: str) -> None:
    sync = harness.sync(kind="sizes")
    sync.push()
    before = sync.trainer.holdings(), sync.worker.holdings()
    if when == "before the digests":
        sync.trainer.hold_digests()
    begin_held(sync, DEADLINE_S)
    if when == "before the digests":
        sync.trainer.overwrite("byte", 0)  # what has been read
        sync.trainer.make_digests()
    else:
        sync.trainer.await_digests()
        sync.trainer.overwrite("medium", -1)  # what has not
    sync.worker.let_go()
    with pytest.raises(CorruptTransfer) as caught:
        outcome(sync.worker, DEADLINE_S)
    assert ("'byte'" if when == "before the digests" else "'medium'") in str(caught.value)
    assert sync.worker.holdings() == NOTHING
    give_up(sync)
    require_next_round(sync, 2)
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before


def test_memory_that_is_freed_during_the_read(harness: Harness) -> None:
    """By copies between processes; over TCP a trainer that serves what it has freed may crash."""
    sync = harness.sync(kind="sizes")
    sync.push()
    before = sync.trainer.holdings(), sync.worker.holdings()
    begin_held(sync, DEADLINE_S)
    sync.trainer.await_digests()
    sync.trainer.free("large")
    sync.worker.let_go()
    with pytest.raises(PeerDead, match="has freed the memory"):
        outcome(sync.worker, DEADLINE_S)
    with pytest.raises(ManifestMismatch, match="freed or resized"):
        sync.trainer.update_info("seal", DEADLINE_S, 1)
    assert sync.worker.holdings() == NOTHING
    give_up(sync)
    sync.trainer.replace("large", 1)
    require_next_round(sync, 2)
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before


def with_handle(info: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """An info whose handle says something else, and has the checksum of that."""
    handle = Handle.from_wire(info["handle"], backend="rdma")
    fields = json.loads(handle.unwrap(backend="rdma"))
    change(fields)
    body = json.dumps(fields).encode()
    return info | {"handle": Handle.wrap(handle.owner, handle.generation, body).to_wire()}


def metadata_of(info: dict[str, Any]) -> str:
    """NIXL's, in base64."""
    handle = Handle.from_wire(info["handle"], backend="rdma")
    metadata: str = json.loads(handle.unwrap(backend="rdma"))["metadata"]
    return metadata


def cut(metadata: str) -> str:
    return base64.b64encode(base64.b64decode(metadata)[:-1]).decode()


def damaged(info: dict[str, Any]) -> dict[str, Any]:
    """An info whose handle has another checksum than it should."""
    body = info["handle"]["body"]
    other = ("B" if body[100] == "A" else "A").join((body[:100], body[101:]))
    return info | {"handle": info["handle"] | {"body": other}}


class Metadata:
    """What a worker may be told instead of the trainer's metadata.

    Args:
        harness: Where another trainer comes from.
        older: What the trainer has told before its memory has moved.
    """

    def __init__(self, harness: Harness, older: dict[str, Any]) -> None:
        self._harness = harness
        self._older = older

    def garbage(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._replaced(info, base64.b64encode(bytes(range(256))).decode())

    def cut_by_a_byte(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._replaced(info, cut(metadata_of(info)))

    def damaged(self, info: dict[str, Any]) -> dict[str, Any]:
        return damaged(info)

    def of_another_agent(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._replaced(info, metadata_of(self._harness.trainer(seed=5).describe(LONG_S)))

    def of_an_older_generation(self, info: dict[str, Any]) -> dict[str, Any]:
        return self._replaced(info, metadata_of(self._older))

    def handle_of_an_older_generation(self, info: dict[str, Any]) -> dict[str, Any]:
        return info | {"handle": self._older["handle"]}

    @staticmethod
    def _replaced(info: dict[str, Any], metadata: str) -> dict[str, Any]:
        return with_handle(info, lambda fields: fields.update(metadata=metadata))


REPLACED: dict[str, tuple[type[WeightTransferError], str]] = {
    "garbage": (CorruptTransfer, "cannot read the peer's metadata"),
    "cut_by_a_byte": (Revoked, "doesn't know this peer"),
    "damaged": (CorruptTransfer, "was damaged on its way"),
    "of_another_agent": (CorruptTransfer, "belongs to another owner"),
    "of_an_older_generation": (Revoked, "doesn't know this peer or this memory"),
    "handle_of_an_older_generation": (Revoked, "doesn't expose this memory any more"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_metadata_that_is_replaced_at_connect(harness: Harness, what: str) -> None:
    sync = harness.sync()
    older = sync.trainer.describe(LONG_S)
    sync.trainer.move(2)
    wrong = getattr(Metadata(harness, older), what)(sync.trainer.describe(LONG_S))
    sync.trainer.serve()
    error_cls, words = REPLACED[what]
    with pytest.raises(error_cls, match=words) as caught:
        sync.worker.init(wrong | {"deadline_s": DEADLINE_S}, within=DEADLINE_S + BEYOND_S)
    assert caught.value.backend == "rdma"
    assert sync.worker.holdings() == NOTHING
    sync.trainer.pause()
    sync.connect()
    require_next_round(sync, 3)


@pytest.mark.parametrize("what", REPLACED)
def test_metadata_that_is_replaced_in_a_round(harness: Harness, what: str) -> None:
    sync = harness.sync()
    sync.push()
    before = sync.trainer.holdings(), sync.worker.holdings()
    older = sync.trainer.describe(LONG_S)
    sync.trainer.move(2)
    sync.begin(DEADLINE_S)
    info = sync.trainer.update_info("open", DEADLINE_S, 1)
    sync.worker.update(getattr(Metadata(harness, older), what)(info))
    error_cls, words = REPLACED[what]
    with pytest.raises(error_cls, match=words) as caught:
        outcome(sync.worker, DEADLINE_S)
    assert caught.value.backend == "rdma"
    assert sync.worker.holdings() == NOTHING
    give_up(sync)
    require_next_round(sync, 3)
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before


ROUNDS = 200
FIRST = 20
MOVES = 10
"""Rounds after which the memory is other memory."""


@pytest.mark.slow
@both
def test_two_hundred_rounds_leave_nothing_behind(harness: Harness) -> None:
    sync = harness.sync()
    for count in range(1, ROUNDS + 1):
        if count % MOVES:
            sync.trainer.write(count)
        else:
            sync.trainer.move(count)
        sync.push()
        assert sync.wrong(count) is None
        if count == FIRST:
            held = Held(sync.trainer, sync.worker)
            before = sync.trainer.holdings(), sync.worker.holdings()
    held.require_no_more(f"{ROUNDS - FIRST} rounds")
    assert (sync.trainer.holdings(), sync.worker.holdings()) == before
