"""WT-49 and WT-50: nothing is left behind, and nothing unpickled."""

from __future__ import annotations

import time
from contextlib import suppress

from vllm_wt.errors import WeightTransferError
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import Harness
from vllm_wt.testing.conformance.process import Process

_ROUNDS = 100
_FIRST = 10
_CONNECTIONS = 20
_GENERATIONS = 30
_KILLED = 8
_ARENA = 2 << 20
_BOUNDS = {
    "threads": 3,  # some have ended, and their end has not been noticed yet
    "files": 3,  # connections likewise
    "names": 3,
    "children": 0,
    "MiB": 24,  # an allocator keeps some; less than a hundred rounds of our tensors
}
"""How much more may be in use."""
_SOON_S = 3.0
_AGAIN_S = 0.1


class _Held:
    """What processes hold, compared with a time before."""

    def __init__(self, *processes: Process) -> None:
        self._processes = processes
        self._before = [process.resources() for process in processes]

    def require_no_more(self, after: str) -> None:
        """At once or soon: a thread that has ended is counted for a moment more."""
        for process, before in zip(self._processes, self._before, strict=True):
            end = time.monotonic() + _SOON_S
            while (more := _more(process.resources(), before)) and time.monotonic() < end:
                time.sleep(_AGAIN_S)
            assert not more, f"{process.title} has {more} after {after}"


def _more(now: dict[str, int], before: dict[str, int]) -> str:
    grown = {what: now[what] - before[what] for what in before}
    return ", ".join(
        f"{grown[what]} more {what}" for what, bound in _BOUNDS.items() if grown[what] > bound
    )


class HygieneChecks:
    def test_a_hundred_rounds_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()
        for count in range(1, _ROUNDS + 1):
            sync.trainer.move(count)
            sync.push()
            if count == _FIRST:
                held = _Held(sync.trainer, sync.worker)
        held.require_no_more(f"{_ROUNDS - _FIRST} rounds")
        assert sync.wrong(_ROUNDS) is None

    def test_connections_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()
        for count in range(_CONNECTIONS):
            if count == _CONNECTIONS // 4:
                held = _Held(sync.trainer, sync.worker)
            sync.worker.shutdown_engine()
            sync.connect()
        held.require_no_more("15 connections")
        sync.push()
        assert sync.wrong(1) is None

    def test_rounds_that_are_given_up_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()
        for count in range(_CONNECTIONS):
            if count == _CONNECTIONS // 4:
                sync.push()  # connected; a round that is given up may leave it so or not
                held = _Held(sync.trainer, sync.worker)
            sync.give_up()
        sync.push()
        held.require_no_more("15 rounds that were given up")
        assert sync.wrong(1) is None

    def test_nothing_is_unpickled(self, harness: Harness) -> None:
        """WT-50"""
        sync = harness.sync()
        sync.push()
        with suppress(WeightTransferError):
            sync.worker.update({"odd": 1})
        for process in (sync.trainer, sync.worker):
            assert process.unpickled() == []


@transports_only
class TransportHygieneChecks:
    def test_generations_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        owner, reader = harness.owner(), harness.reader([_ARENA])
        for count in range(1, _GENERATIONS + 1):
            owner.hold("moved", [_ARENA], count)
            harness.connect(reader, owner, count, [_ARENA], "moved")
            assert reader.read("plan") == _ARENA
            reader.notify(owner.name, count)
            owner.revoke(count)
            owner.unregister("moved")
            owner.forget("moved")
            reader.start_anew([_ARENA])
            if count == _FIRST:
                held = _Held(owner, reader)
        held.require_no_more(f"{_GENERATIONS - _FIRST} generations")

    def test_a_hundred_passes_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        owner, reader = harness.connected(400_000)
        for count in range(1, _ROUNDS + 1):
            assert reader.read("plan") == 400_000
            reader.notify(owner.name, count)
            if count == _FIRST:
                held = _Held(owner, reader)
        held.require_no_more(f"{_ROUNDS - _FIRST} passes")

    def test_readers_that_were_killed_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49: at the owner."""
        owner, reader = harness.connected()
        assert reader.read("plan") == 100_000
        held = _Held(owner)
        for _ in range(_KILLED):
            killed = harness.reader_of(owner, 1, [100_000])
            assert killed.read("plan") == 100_000
            killed.kill()
        assert reader.read("plan") == 100_000
        held.require_no_more(f"{_KILLED} readers that were killed")

    def test_a_transport_unpickles_nothing(self, harness: Harness) -> None:
        """WT-50"""
        owner, reader = harness.connected()
        reader.read("plan")
        reader.notify(owner.name, 1)
        owner.readers(1)
        for process in (owner, reader):
            assert process.unpickled() == []
