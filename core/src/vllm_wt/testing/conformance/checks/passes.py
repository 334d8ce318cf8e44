"""WT-11 to WT-16: plans, and passes over them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from vllm_wt.errors import OutOfBounds, WeightTransferError, WrongOrder
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import LONG_S, EndpointProcess, Harness
from vllm_wt.testing.conformance.process import MOMENTS_S
from vllm_wt.testing.conformance.resources import memory_available

_LARGE = 40 << 20
_PATTERN = 0x5A
_LATE_S = 0.2
_HUGE = (4 << 30) + (1 << 20)
_FOR_HUGE = 12 << 30


@transports_only
class PassChecks:
    def test_a_copy_out_of_bounds_is_refused(self, harness: Harness) -> None:
        """WT-11"""
        owner, reader = harness.connected(1000)
        name = owner.name
        for copy in (
            [name, 0, 0, 0, 0, 1001],
            [name, 0, 1, 0, 0, 1000],
            [name, 0, 1000, 0, 0, 1],
            [name, 0, 0, 0, 1, 1000],
            [name, 0, 0, 0, 1000, 1],
            [name, 0, 2**63, 0, 0, 1],
            [name, 0, 0, 0, 2**63, 1],
            [name, 0, 0, 0, 0, 2**63],
        ):
            with pytest.raises(OutOfBounds):
                reader.prepare("bad", "arena", [[name, 0, 0, 0, 0, 10], copy])
        _require_untouched_and_working(reader)

    def test_a_copy_that_makes_no_sense_is_refused(self, harness: Harness) -> None:
        """WT-11: no bytes, negative numbers, a buffer or an owner that there isn't."""
        owner, reader = harness.connected(1000)
        name = owner.name
        for copy in (
            [name, 0, 0, 0, 0, 0],
            [name, 0, 0, 0, 0, -1],
            [name, 0, -1, 0, 0, 10],
            [name, 0, 0, 0, -1, 10],
            [name, 1, 0, 0, 0, 10],
            [name, 0, 0, 1, 0, 10],
            [name, -1, 0, 0, 0, 10],
            [name, 0, 0, -1, 0, 10],
            ["nobody", 0, 0, 0, 0, 10],
        ):
            with pytest.raises(WeightTransferError):
                reader.prepare("bad", "arena", [copy])
        _require_untouched_and_working(reader)

    def test_copies_anywhere_are_exact(self, harness: Harness) -> None:
        """WT-12: of any length, at any offset, over several buffers, and no byte beside them."""
        _require_exact(harness, [4096, 10_007, 3], [9001, 5000, 17], count=300, longest=700)

    def test_offsets_beyond_4_gib_are_exact(self, harness: Harness) -> None:
        """WT-12"""
        if memory_available() < _FOR_HUGE:
            pytest.skip("this host has less than 12 GiB of memory to spare")
        owner, reader = harness.owner(), harness.reader()
        owner.hold_large("weights", _HUGE, within=LONG_S)
        reader.hold_large("arena", _HUGE, within=LONG_S)
        places = (0, (2 << 30) - 500, (4 << 30) - 500, _HUGE - 1000)
        for seed, place in enumerate(places, start=1):
            owner.write_part("weights", place, 1000, seed)
            reader.write_part("arena", place, 1000, 9)
        copies = [[owner.name, 0, place, 0, place, 1000] for place in places]
        reader.open(owner.name, 1, owner.expose("weights", 1, within=LONG_S), LONG_S)
        reader.prepare("plan", "arena", copies)
        assert reader.read("plan", within=LONG_S + MOMENTS_S) == 4000
        for seed, place in enumerate(places, start=1):
            assert not reader.wrong_part("arena", place, 1000, seed), f"at offset {place}"

    def test_as_many_copies_as_promised_are_exact(self, harness: Harness) -> None:
        """WT-12: up to ``max_descriptors``, of which thirty thousand are tried."""
        owner, reader = harness.apart(60_000)
        reader.open(owner.name, 1, owner.expose("weights", 1), LONG_S)
        count = min(reader.max_descriptors(), 30_000)
        copies = [[owner.name, 0, 2 * i, 0, 2 * i, 1] for i in range(count)]
        reader.prepare("plan", "arena", copies, within=LONG_S)
        assert reader.read("plan", within=LONG_S + MOMENTS_S) == count
        owned = {owner.name: [[60_000, 1]]}
        assert reader.wrong_copy("arena", copies, owned, within=LONG_S) is None

    def test_ten_thousand_copies_are_exact(self, harness: Harness) -> None:
        """WT-12"""
        _require_exact(harness, [300_000], [400_001], count=10_000, longest=30)

    def test_one_byte_is_exact(self, harness: Harness) -> None:
        """WT-12"""
        _, reader = harness.connected(1)
        assert reader.read("plan") == 1
        assert reader.wrong_byte("arena", 1) is None

    def test_nothing_is_read_at_once(self, harness: Harness) -> None:
        """WT-12: no copies, of no buffers: a model may have empty tensors only."""
        owner, reader = harness.owner(), harness.reader()
        owner.hold("weights", [])
        reader.hold("arena", [10])
        harness.connect(reader, owner, 1, [])
        assert reader.read("plan") == 0
        assert reader.not_filled("arena", 0) is None

    def test_a_large_buffer_is_exact(self, harness: Harness) -> None:
        """WT-12: larger than any buffer of the transport's own."""
        _, reader = harness.connected(_LARGE)
        assert reader.read("plan", within=LONG_S + MOMENTS_S) == _LARGE
        assert reader.wrong_byte("arena", 1, within=LONG_S) is None

    def test_progress_is_honest(self, harness: Harness) -> None:
        """WT-13: it rises to the plan's bytes, and at ``done`` the last byte is there."""
        _, reader = harness.connected(_LARGE)
        reader.submit("plan")
        end = reader.poll_until("plan", 1 << 62, LONG_S, within=LONG_S + MOMENTS_S)
        assert reader.wrong_byte("arena", 1, within=LONG_S) is None
        assert end["fell"] == 0, f"progress fell by {end['fell']} bytes"
        assert (end["done"], end["nbytes"]) == (True, _LARGE)

    def test_a_plan_is_used_again(self, harness: Harness) -> None:
        """WT-14"""
        owner, reader = harness.connected()
        for seed in range(1, 6):
            owner.write("weights", seed)
            reader.fill("arena", 0)
            assert reader.read("plan") == 100_000
            assert reader.wrong_byte("arena", seed) is None

    def test_one_byte_that_changed_is_read(self, harness: Harness) -> None:
        """WT-14: wherever it is."""
        owner, reader = harness.connected()
        for index in (99_999, 50_001, 0):
            assert reader.read("plan") == 100_000
            owner.poke("weights", index)
            assert reader.read("plan") == 100_000
            assert reader.digest("arena") == owner.digest("weights")

    def test_a_plan_is_used_hundreds_of_times(self, harness: Harness) -> None:
        """WT-14"""
        owner, reader = harness.connected(1000)
        reader.read_often("plan", 300, within=LONG_S + MOMENTS_S)
        owner.write("weights", 2)
        assert reader.read("plan") == 1000
        assert reader.wrong_byte("arena", 2) is None

    def test_plans_live_side_by_side(self, harness: Harness) -> None:
        """WT-14"""
        owner, reader = harness.connected(1000)
        reader.hold("other", [1000])
        reader.prepare("second", "arena", [[owner.name, 0, 500, 0, 0, 500]])
        assert reader.read("plan") == 1000
        assert reader.not_filled("other", 0) is None
        assert reader.wrong_byte("arena", 1) is None
        assert reader.read("second") == 500
        assert reader.read("plan") == 1000
        assert reader.wrong_byte("arena", 1) is None

    def test_a_second_pass_at_a_time_is_refused(self, harness: Harness) -> None:
        """WT-15"""
        _, reader = harness.connected(_LARGE)
        reader.submit("plan")
        with pytest.raises(WrongOrder):
            reader.submit("plan")
        end = reader.poll_until("plan", 1 << 62, LONG_S, within=LONG_S + MOMENTS_S)
        assert (end["done"], end["nbytes"]) == (True, _LARGE)
        assert reader.wrong_byte("arena", 1, within=LONG_S) is None

    def test_nothing_is_written_after_a_cancel(self, harness: Harness) -> None:
        """WT-16: at the start, and with a part read."""
        for nbytes in (0, 1):
            owner, reader = harness.connected(_LARGE)
            reader.submit("plan")
            reader.poll_until("plan", nbytes, LONG_S, within=LONG_S + MOMENTS_S)
            assert reader.cancel("plan"), "cancel says that something may still write"
            reader.fill("arena", _PATTERN)
            owner.write("weights", 3)
            _require_works_or_is_spent(owner, reader)

    def test_a_pass_that_is_done_is_cancelled_to_no_effect(self, harness: Harness) -> None:
        """WT-16"""
        _, reader = harness.connected()
        for _ in range(2):
            assert reader.read("plan") == 100_000
            assert reader.cancel("plan")
        assert reader.wrong_byte("arena", 1) is None

    def test_a_pass_that_waits_for_a_stopped_owner_is_given_up(self, harness: Harness) -> None:
        """WT-16, WT-20: what the owner had under way writes nothing when it goes on."""
        owner, reader = harness.connected(_LARGE)
        owner.stop()
        reader.submit("plan")
        end = reader.poll_until("plan", 1 << 62, 0.5)
        if not end["done"]:
            assert reader.cancel("plan"), "cancel says that something may still write"
        reader.fill("arena", _PATTERN)
        owner.go_on()
        owner.write("weights", 3)
        _require_works_or_is_spent(owner, reader)


def _require_untouched_and_working(reader: EndpointProcess) -> None:
    assert reader.not_filled("arena", 0) is None
    assert reader.read("plan") == 1000
    assert reader.wrong_byte("arena", 1) is None


def _require_exact(
    harness: Harness, sources: list[int], targets: list[int], *, count: int, longest: int
) -> None:
    """Copies at random, none over another, in the target or not."""
    owner, reader = harness.owner(sources, 1), harness.reader(targets)
    reader.open(owner.name, 1, owner.expose("weights", 1), LONG_S)
    alignment = reader.alignment()
    copies = _random_copies(owner.name, sources, targets, count, longest, alignment)
    reader.prepare("plan", "arena", copies, within=LONG_S)
    assert reader.read("plan", within=LONG_S + MOMENTS_S) == sum(copy[5] for copy in copies)
    owned = {owner.name: [[nbytes, 1 + index] for index, nbytes in enumerate(sources)]}
    assert reader.wrong_copy("arena", copies, owned) is None


def _random_copies(
    owner: str, sources: list[int], targets: list[int], count: int, longest: int, alignment: int
) -> list[list[Any]]:
    draw = random.Random(count)
    copies: list[list[Any]] = []
    free = [(index, 0) for index in range(len(targets))]
    while free and len(copies) < count:
        index, start = free.pop(draw.randrange(len(free)))
        source = draw.randrange(len(sources))
        nbytes = min(draw.randint(1, longest), targets[index] - start, sources[source])
        offset = draw.randint(0, (sources[source] - nbytes) // alignment) * alignment
        copies.append([owner, source, offset, index, start, nbytes])
        after = -(-(start + nbytes + draw.choice((0, 0, 1, 9))) // alignment) * alignment
        if after < targets[index]:
            free.append((index, after))
    draw.shuffle(copies)
    return copies


def _require_works_or_is_spent(owner: EndpointProcess, reader: EndpointProcess) -> None:
    """After a cancel, with the arena filled with a pattern."""
    time.sleep(_LATE_S)  # for a write that is late
    assert reader.not_filled("arena", _PATTERN, within=LONG_S) is None
    try:
        nbytes = reader.read("plan", within=LONG_S + MOMENTS_S)
    except WeightTransferError:
        with pytest.raises(WeightTransferError):
            reader.hold("another", [10])
        assert reader.not_filled("arena", _PATTERN, within=LONG_S) is None
        reader.close(within=MOMENTS_S)
        return
    assert nbytes == _LARGE
    assert reader.wrong_byte("arena", 3, within=LONG_S) is None
    assert owner.wrong_byte("weights", 3, within=LONG_S) is None
