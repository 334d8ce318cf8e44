"""WT-49 and WT-50: nothing is left behind, and nothing unpickled."""

from __future__ import annotations

from contextlib import suppress

from vllm_wt.errors import WeightTransferError
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import Harness
from vllm_wt.testing.conformance.held import Held, require_no_more_in_turns

_ROUNDS = 100
_FIRST = 10
_CONNECTIONS = 20
_GENERATIONS = 30
_GIVEN_UP = 10
_KILLED = 8
_ARENA = 2 << 20


class HygieneChecks:
    def test_a_hundred_rounds_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()
        for count in range(1, _ROUNDS + 1):
            sync.trainer.move(count)
            sync.push()
            if count == _FIRST:
                held = Held(sync.trainer, sync.worker)
        held.require_no_more(f"{_ROUNDS - _FIRST} rounds")
        assert sync.wrong(_ROUNDS) is None

    def test_connections_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()
        for count in range(_CONNECTIONS):
            if count == _CONNECTIONS // 4:
                held = Held(sync.trainer, sync.worker)
            sync.worker.shutdown_engine()
            sync.connect()
        held.require_no_more("15 connections")
        sync.push()
        assert sync.wrong(1) is None

    def test_rounds_that_are_given_up_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        sync = harness.sync()

        def give_up() -> None:
            for _ in range(_GIVEN_UP):
                sync.give_up()
            sync.push()  # connected; a round that is given up may leave it so or not

        give_up()
        # What a fabric takes for itself after some of them, once (NCCL: 35 MiB), is left nowhere.
        require_no_more_in_turns(
            [sync.trainer, sync.worker], give_up, f"{_GIVEN_UP} rounds that were given up"
        )
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
                held = Held(owner, reader)
        held.require_no_more(f"{_GENERATIONS - _FIRST} generations")

    def test_a_hundred_passes_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49"""
        owner, reader = harness.connected(400_000)
        for count in range(1, _ROUNDS + 1):
            assert reader.read("plan") == 400_000
            reader.notify(owner.name, count)
            if count == _FIRST:
                held = Held(owner, reader)
        held.require_no_more(f"{_ROUNDS - _FIRST} passes")

    def test_readers_that_were_killed_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49: at the owner."""
        owner, reader = harness.connected()
        assert reader.read("plan") == 100_000
        held = Held(owner)
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
