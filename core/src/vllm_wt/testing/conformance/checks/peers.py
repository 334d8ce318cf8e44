"""WT-19 to WT-23: owners and readers that die, stop, or are not what they seem."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from vllm_wt.errors import WeightTransferError
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import LONG_S, EndpointProcess, Harness, until
from vllm_wt.testing.conformance.process import MOMENTS_S

_LARGE = 40 << 20
_SLOW_POLL_S = 2.0
_LATE_S = 0.2
_WHILE_S = 3.0
"""Longer than what a fabric may give up after on its own."""


@transports_only
class PeerChecks:
    def test_an_owner_that_dies_before_a_pass(self, harness: Harness) -> None:
        """WT-19"""
        owner, reader = harness.connected()
        owner.kill()
        _require_never_done(reader)
        _require_ends(reader)

    def test_an_owner_that_dies_during_a_pass(self, harness: Harness) -> None:
        """WT-19"""
        owner, reader = harness.connected(_LARGE)
        reader.submit("plan")
        reader.poll_until("plan", 1, LONG_S, within=LONG_S + MOMENTS_S)
        owner.kill()
        try:
            end = reader.poll_until("plan", 1 << 62, 1.0)
        except WeightTransferError:
            pass
        else:
            if end["done"]:  # it had read everything
                assert reader.wrong_byte("arena", 1, within=LONG_S) is None
        _require_ends(reader)

    def test_an_owner_that_stops_and_goes_on_has_only_been_slow(self, harness: Harness) -> None:
        """WT-20, WT-13"""
        owner, reader = harness.connected(_LARGE)
        owner.stop()
        reader.submit("plan")
        end = reader.poll_until("plan", 1 << 62, _WHILE_S)
        assert end["slowest"] < _SLOW_POLL_S, f"a poll took {end['slowest']:.1f} s"
        owner.go_on()
        if not end["done"]:
            end = reader.poll_until("plan", 1 << 62, LONG_S, within=LONG_S + MOMENTS_S)
        assert (end["done"], end["nbytes"]) == (True, _LARGE)
        assert reader.wrong_byte("arena", 1, within=LONG_S) is None

    def test_a_stopped_owner_holds_up_no_other_call(self, harness: Harness) -> None:
        """WT-20: of a reader that has read everything."""
        owner, reader = harness.connected()
        reader.hold("other", [1000])
        assert reader.read("plan") == 100_000
        owner.stop()
        reader.notify(owner.name, 1)
        reader.prepare("second", "arena", [[owner.name, 0, 0, 0, 0, 10]])
        reader.unregister("other")
        owner.go_on()
        until(lambda: owner.readers(1) == [reader.name], MOMENTS_S, "a report is lost with a stop")

    def test_a_reader_that_dies_takes_nobody_with_it(self, harness: Harness) -> None:
        """WT-21"""
        owner, reader = harness.connected(_LARGE)
        reader.submit("plan")
        reader.poll_until("plan", 1, LONG_S, within=LONG_S + MOMENTS_S)
        reader.kill()
        _require_read_by_another(harness, owner, _LARGE)

    def test_a_reader_that_stops_holds_nobody_up(self, harness: Harness) -> None:
        """WT-21: in the middle of a pass."""
        owner, reader = harness.connected(_LARGE)
        reader.submit("plan")
        reader.poll_until("plan", 1, LONG_S, within=LONG_S + MOMENTS_S)
        reader.stop()
        _require_read_by_another(harness, owner, _LARGE)
        owner.hold("more", [1000])
        owner.revoke(1)
        owner.unregister("weights")
        owner.close(within=MOMENTS_S)
        reader.go_on()

    def test_strangers_change_nothing(self, harness: Harness) -> None:
        """WT-22: garbage, and silence, on every port that an endpoint listens on."""
        owner, reader = harness.connected()
        draw = random.Random(22)
        kept = []
        for host, port in (*owner.listening(), *reader.listening()):
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, draw.randbytes(100_000)):
                with suppress(OSError):  # a stranger may be shown the door
                    stranger = socket.create_connection((host, port), MOMENTS_S)
                    kept.append(stranger)
                    stranger.settimeout(1.0)
                    stranger.sendall(said)
        if not kept:
            pytest.skip("it has no TCP port to be reached at, and the kit knows no other strangers")
        try:
            assert reader.read("plan") == 100_000
            assert reader.wrong_byte("arena", 1) is None
            _require_read_by_another(harness, owner, 100_000)
        finally:
            for stranger in kept:
                stranger.close()
        assert reader.read("plan") == 100_000

    def test_closed_twice_and_with_a_dead_peer(self, harness: Harness) -> None:
        """WT-23"""
        owner, reader = harness.connected()
        reader.read("plan")
        owner.kill()
        for _ in range(2):
            reader.close(within=MOMENTS_S)
        other = harness.owner([100])
        other.expose("weights", 1)
        for _ in range(2):
            other.close(within=MOMENTS_S)
        other.check_serving()

    def test_closed_with_a_stopped_peer(self, harness: Harness) -> None:
        """WT-23"""
        owner, reader = harness.connected(_LARGE)
        owner.stop()
        reader.submit("plan")
        reader.poll_until("plan", 1, 0.2)
        reader.close(within=MOMENTS_S)
        owner.go_on()
        owner.readers(1)

    def test_nothing_is_written_after_a_close(self, harness: Harness) -> None:
        """WT-23: in the middle of a pass."""
        owner, reader = harness.connected(_LARGE)
        reader.submit("plan")
        reader.poll_until("plan", 1, LONG_S, within=LONG_S + MOMENTS_S)
        reader.close()
        reader.fill("arena", 0)
        owner.write("weights", 3)
        time.sleep(_LATE_S)
        assert reader.not_filled("arena", 0, within=LONG_S) is None

    def test_what_is_closed_is_used_no_more(self, harness: Harness) -> None:
        """WT-23"""
        owner, reader = harness.connected()
        handle = owner.expose("weights", 1)
        reader.close(within=MOMENTS_S)
        _require_refused(
            lambda: reader.hold("more", [10]),
            lambda: reader.open(owner.name, 1, handle, 1.0),
            lambda: reader.prepare("more", "arena", [[owner.name, 0, 0, 0, 0, 10]]),
            lambda: reader.read("plan"),
            lambda: reader.notify(owner.name, 1),
        )
        owner.close(within=MOMENTS_S)
        _require_refused(lambda: owner.expose("weights", 2), lambda: owner.hold("more", [10]))

    def test_a_new_transport_in_the_same_process(self, harness: Harness) -> None:
        """WT-23"""
        owner, reader = harness.connected()
        reader.read("plan")
        reader.start_anew([100_000])
        harness.connect(reader, owner, 1, [100_000])
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 1) is None


def _require_never_done(reader: EndpointProcess) -> None:
    try:
        nbytes = reader.read("plan", 1.0)
    except WeightTransferError:
        return
    assert nbytes == -1, "a pass over the memory of a process that was killed is done"


def _require_refused(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(WeightTransferError):
            call()


def _require_ends(reader: EndpointProcess) -> None:
    reader.cancel("plan")
    reader.close(within=MOMENTS_S)


def _require_read_by_another(harness: Harness, owner: EndpointProcess, nbytes: int) -> None:
    another = harness.reader_of(owner, 1, [nbytes])
    assert another.read("plan", within=LONG_S + MOMENTS_S) == nbytes
    assert another.wrong_byte("arena", 1, within=LONG_S) is None
    another.notify(owner.name, 77)
    until(lambda: another.name in owner.readers(77), MOMENTS_S, "a report does not reach the owner")
    owner.check_serving()
