"""WT-08 to WT-10: connecting a reader."""

from __future__ import annotations

import base64
import random
from contextlib import suppress

import pytest

from vllm_wt.errors import PeerDead, Revoked, Timeout, WeightTransferError, WrongOrder
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import (
    LONG_S,
    SHORT_S,
    EndpointProcess,
    Harness,
    new_name,
)

_FLIPS = 24
_PICKLE = b"\x80\x04}\x94(\x8c\x05owner\x94\x8c\x05owner\x94\x8c\ngeneration\x94K\x01u."
"""A dictionary."""


@transports_only
class ConnectingChecks:
    def test_an_owner_that_was_killed_cannot_be_opened(self, harness: Harness) -> None:
        """WT-08"""
        owner, reader = harness.apart(1000)
        handle = owner.expose("weights", 1)
        owner.kill()
        with pytest.raises((PeerDead, Timeout)):
            reader.open(owner.name, 1, handle, SHORT_S)
        _require_a_new_pair_works(harness, reader)

    def test_an_owner_that_was_closed_cannot_be_opened(self, harness: Harness) -> None:
        """WT-08"""
        owner, reader = harness.apart(1000)
        handle = owner.expose("weights", 1)
        owner.close(within=LONG_S)
        with pytest.raises((PeerDead, Timeout, Revoked)):
            reader.open(owner.name, 1, handle, SHORT_S)
        _require_a_new_pair_works(harness, reader)

    def test_an_owner_that_is_stopped_is_opened_in_time_or_not(self, harness: Harness) -> None:
        """WT-08"""
        owner, reader = harness.apart(1000)
        handle = owner.expose("weights", 1)
        owner.stop()
        with suppress(PeerDead, Timeout):
            reader.open(owner.name, 1, handle, SHORT_S)
        owner.go_on()
        another = harness.reader([1000])
        another.open(owner.name, 1, handle, LONG_S)
        _require_a_new_pair_works(harness, reader)

    def test_what_was_revoked_cannot_be_opened(self, harness: Harness) -> None:
        """WT-08, WT-17"""
        owner, reader = harness.apart(1000)
        handle = owner.expose("weights", 1)
        owner.revoke(1)
        with pytest.raises(Revoked):
            reader.open(owner.name, 1, handle, SHORT_S)

    def test_a_cut_handle_is_refused(self, harness: Harness) -> None:
        """WT-09: empty, cut, longer."""
        owner, reader = harness.apart(1000)
        good = base64.b64decode(owner.expose("weights", 1))
        for bad in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0"):
            _require_refused(reader, owner.name, bad)
        _require_opens(owner, reader, good)

    def test_a_flipped_handle_does_no_harm(self, harness: Harness) -> None:
        """WT-09: at any of many places. Core has a checksum over it; here nothing may break."""
        owner, reader = harness.apart(1000)
        good = base64.b64decode(owner.expose("weights", 1))
        for at in random.Random(9).sample(range(len(good)), min(_FLIPS, len(good))):
            bad = good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]
            with suppress(WeightTransferError):
                reader.open(owner.name, 1, base64.b64encode(bad).decode(), SHORT_S)
        reader.start_anew([1000])
        _require_opens(owner, reader, good)

    def test_foreign_bytes_are_refused(self, harness: Harness) -> None:
        """WT-09, WT-50: random ones, JSON of something else, a pickle."""
        owner, reader = harness.apart(1000)
        good = base64.b64decode(owner.expose("weights", 1))
        foreign = [
            random.Random(9).randbytes(len(good)),
            b"\0" * len(good),
            b"null",
            b"[]",
            b'{"owner": 1}',
            b"[" * 100_000,
            _PICKLE,
        ]
        for bad in foreign:
            _require_refused(reader, owner.name, bad)
        assert reader.unpickled() == []
        _require_opens(owner, reader, good)

    def test_a_handle_of_another_owner_or_generation_is_refused(self, harness: Harness) -> None:
        """WT-09"""
        owner, reader = harness.apart(1000)
        good = base64.b64decode(owner.expose("weights", 1))
        _require_refused(reader, new_name("owner"), good)
        _require_refused(reader, owner.name, good, generation=2)
        _require_opens(owner, reader, good)

    def test_an_owner_is_opened_once(self, harness: Harness) -> None:
        """WT-10"""
        owner, reader = harness.connected()
        with pytest.raises(WrongOrder):
            reader.open(owner.name, 1, owner.expose("weights", 1), LONG_S)
        owner.hold("moved", [100_000], 7)
        moved = owner.expose("moved", 2)
        with pytest.raises(WrongOrder):
            reader.open(owner.name, 2, moved, LONG_S)
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 1) is None

    def test_a_new_generation_is_read_through_a_new_transport(self, harness: Harness) -> None:
        """WT-10"""
        owner, reader = harness.connected()
        reader.read("plan")
        owner.hold("moved", [100_000], 7)
        owner.revoke(1)
        owner.unregister("weights")
        reader.start_anew([100_000])
        harness.connect(reader, owner, 2, [100_000], "moved")
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 7) is None


def _require_refused(reader: EndpointProcess, owner: str, bad: bytes, generation: int = 1) -> None:
    try:
        reader.open(owner, generation, base64.b64encode(bad).decode(), SHORT_S)
    except WeightTransferError:
        return
    raise AssertionError(f"opened a handle that is none: {bad[:60]!r}, {len(bad)} bytes")


def _require_opens(owner: EndpointProcess, reader: EndpointProcess, handle: bytes) -> None:
    reader.open(owner.name, 1, base64.b64encode(handle).decode(), LONG_S)
    reader.prepare("plan", "arena", [[owner.name, 0, 0, 0, 0, 1000]])
    assert reader.read("plan") == 1000
    assert reader.wrong_byte("arena", 1) is None


def _require_a_new_pair_works(harness: Harness, reader: EndpointProcess) -> None:
    """With a new transport in the reader's process."""
    reader.start_anew([1000])
    owner = harness.owner([1000])
    _require_opens(owner, reader, base64.b64decode(owner.expose("weights", 1)))
