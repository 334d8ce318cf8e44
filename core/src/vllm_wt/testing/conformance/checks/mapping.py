"""WT-51 to WT-53: an owner's memory in the readers' own address space."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_wt.errors import PeerDead, Revoked, WeightTransferError
from vllm_wt.testing.conformance.gate import mapping_only
from vllm_wt.testing.conformance.harness import (
    LONG_S,
    SHORT_S,
    EndpointProcess,
    Harness,
    until,
)
from vllm_wt.testing.conformance.held import Held
from vllm_wt.testing.conformance.process import MOMENTS_S

_SIZES = [4099, 1, 70_000, 4099, 8192]
"""Two of one size, and none of them in the order of sizes."""
_TIMES = 24
_FIRST = 4
_MOVED = 2 << 20
_FORMS = ("allocated", "views", "shared", "private")


@mapping_only
class MappingChecks:
    def test_a_map_has_the_owner_s_buffers_in_order(self, harness: Harness) -> None:
        """WT-51: as often as it is asked for."""
        _, reader = _mapped(harness)
        device = reader.forms("mapped")[0][2]
        assert device == harness.device.partition(":")[0]
        assert reader.forms("mapped") == [["torch.uint8", [n], device, True] for n in _SIZES]
        assert reader.wrong_byte("mapped", 1) is None

    def test_a_map_is_had_again(self, harness: Harness) -> None:
        """WT-51"""
        owner, reader = _mapped(harness)
        reader.map("again", owner.name)
        owner.write("weights", 2)
        for key in ("again", "mapped"):
            assert reader.wrong_byte(key, 2) is None
        reader.forget("again")
        assert reader.wrong_byte("mapped", 2) is None

    def test_a_map_shows_what_the_owner_writes(self, harness: Harness) -> None:
        """WT-51: all of it, and one byte, with no call of the reader's in between."""
        owner, reader = _mapped(harness)
        for seed in (2, 3):
            owner.write("weights", seed)
            assert reader.wrong_byte("mapped", seed) is None
        owner.poke("weights", 17)
        assert reader.digest("mapped") == owner.digest("weights")

    def test_a_map_outlives_what_was_exposed(self, harness: Harness) -> None:
        """WT-51: revoked, unregistered, freed."""
        owner, reader = _mapped(harness)
        for method, argument in (("revoke", 1), ("unregister", "weights"), ("forget", "weights")):
            owner.call(method, MOMENTS_S, argument)
            _require_refused(lambda: reader.check(owner.name))
            _require_readable(reader)
        owner.hold("others", _SIZES, 9)
        _require_readable(reader)

    def test_a_map_outlives_an_owner_that_is_closed(self, harness: Harness) -> None:
        """WT-51, WT-52"""
        owner, reader = _mapped(harness)
        owner.close(within=MOMENTS_S)
        _await_refusal(reader, owner, (PeerDead, Revoked))
        _require_readable(reader)
        reader.close(within=MOMENTS_S)

    def test_a_map_outlives_an_owner_that_was_killed(self, harness: Harness) -> None:
        """WT-51"""
        owner, reader = _mapped(harness)
        owner.kill()
        _require_readable(reader)
        _await_refusal(reader, owner, (PeerDead,))
        _require_readable(reader)
        reader.close(within=MOMENTS_S)

    def test_owners_and_readers_are_mapped_side_by_side(self, harness: Harness) -> None:
        """WT-51: one that goes takes no other with it."""
        owners = [harness.owner(_SIZES, seed) for seed in (10, 20)]
        readers = [harness.reader() for _ in range(3)]
        for reader in readers:
            for owner in owners:
                handle = owner.expose("weights", 1)
                reader.open(owner.name, 1, handle, LONG_S, within=LONG_S + MOMENTS_S)
            for owner in owners:
                reader.map(owner.name, owner.name)
        _require_shown(readers, owners, (10, 20))
        readers[0].kill()
        readers[1].close(within=MOMENTS_S)
        owners[0].write("weights", 30)
        _require_shown(readers[2:], owners, (30, 20))
        owners[1].kill()
        owners[0].write("weights", 40)
        _require_shown(readers[2:], owners[:1], (40,))
        readers[2].check(owners[0].name)

    def test_what_is_not_open_is_not_mapped(self, harness: Harness) -> None:
        """WT-51, WT-52: never opened, refused when it was, closed."""
        owner, reader = harness.owner(_SIZES), harness.reader()
        handle = owner.expose("weights", 1)
        _require_no_map(reader, owner)
        _require_refused(lambda: reader.open(owner.name, 2, handle, SHORT_S))
        _require_no_map(reader, owner)
        reader.open(owner.name, 1, handle, LONG_S, within=LONG_S + MOMENTS_S)
        reader.map("mapped", owner.name)
        assert reader.wrong_byte("mapped", 1) is None
        reader.forget("mapped")
        reader.close(within=MOMENTS_S)
        _require_no_map(reader, owner)

    def test_rounds_of_memory_that_is_mapped_in_place(self, harness: Harness) -> None:
        """WT-51, WT-53: of a trainer whose tensors need not be copied."""
        sync = harness.sync(in_place=True)
        sync.push()
        assert sync.wrong(1) is None
        for change, seed in ((sync.trainer.write, 2), (sync.trainer.move, 3)):
            change(seed)
            sync.push()
            assert sync.wrong(seed) is None

    def test_an_owner_that_lives_passes_the_check(self, harness: Harness) -> None:
        """WT-52: stopped, too."""
        owner, reader = _mapped(harness)
        owner.hold("others", [1000], 5)
        owner.expose("others", 2)
        owner.revoke(2)
        reader.check(owner.name)
        owner.stop()
        for _ in range(3):
            reader.check(owner.name)
        assert reader.wrong_byte("mapped", 1) is None
        owner.go_on()
        reader.check(owner.name)

    def test_an_owner_that_has_revoked_fails_the_check(self, harness: Harness) -> None:
        """WT-52: at once, for good, and of that generation only."""
        owner, reader = _mapped(harness)
        owner.hold("moved", [1000], 7)
        handle = owner.expose("moved", 2)
        another = harness.reader()
        another.open(owner.name, 2, handle, LONG_S, within=LONG_S + MOMENTS_S)
        owner.revoke(1)
        with pytest.raises(Revoked):
            reader.check(owner.name)
        owner.expose("weights", 3)
        owner.stop()
        with pytest.raises(Revoked):
            reader.check(owner.name)
        another.check(owner.name)
        owner.go_on()

    def test_an_owner_that_was_killed_fails_the_check(self, harness: Harness) -> None:
        """WT-52: also while it was stopped."""
        for stops in (False, True):
            owner, reader = _mapped(harness)
            reader.check(owner.name)
            if stops:
                owner.stop()
            owner.kill()
            _await_refusal(reader, owner, (PeerDead,))

    def test_what_is_allocated_is_zeros(self, harness: Harness) -> None:
        """WT-53: in memory that was used before, too."""
        owner = harness.owner()
        for _ in range(3):
            owner.hold("made", [1, 5000, 1 << 20])
            device = harness.device.partition(":")[0]
            expected = [["torch.uint8", [n], device, True] for n in (1, 5000, 1 << 20)]
            assert owner.forms("made") == expected
            assert owner.not_filled("made", 0) is None
            owner.fill("made", 0xA5)
            owner.unregister("made")
            owner.forget("made")

    def test_what_is_allocated_can_be_exposed(self, harness: Harness) -> None:
        """WT-53: with any view of it; and it stays when the transport has gone."""
        owner = harness.owner()
        for number, form in enumerate(("allocated", "views"), start=1):
            owner.hold(form, _SIZES, number, form)
            assert all(owner.exposable(form)), f"{form}: exposable says no"
            _require_exposed(harness, owner, form, number)
        owner.close(within=MOMENTS_S)
        owner.write("views", 7)
        assert owner.wrong_byte("views", 7) is None

    def test_exposable_is_true(self, harness: Harness) -> None:
        """WT-53: of each kind of memory; what cannot be exposed is refused by `expose`."""
        owner = harness.owner()
        for number, form in enumerate(_FORMS, start=1):
            owner.hold(form, _SIZES, number, form)
            if _all_exposable(owner, form):
                _require_exposed(harness, owner, form, number)
            else:
                with pytest.raises(WeightTransferError):
                    owner.expose(form, number)
        owner.hold("good", _SIZES, 9)
        _require_exposed(harness, owner, "good", 9)

    def test_what_can_be_mapped_is_near(self, harness: Harness) -> None:
        """WT-53: said before it is opened, and by the owner's process, too."""
        owner, reader = harness.owner(), harness.reader()
        owner.hold("weights", _SIZES, 1)
        handle = owner.expose("weights", 1)
        assert reader.is_near(handle)
        assert owner.is_near(handle)
        for garbage in ("", "AAAA", handle[: len(handle) // 8 * 4]):
            with pytest.raises(WeightTransferError):
                reader.is_near(garbage)
        _open_and_map(reader, owner, "weights", 1)

    def test_memory_that_nobody_has_opened_leaves_nothing_behind(self, harness: Harness) -> None:
        """WT-49, WT-53: allocated; allocated and exposed."""
        owner = harness.owner()
        for count in range(1, _TIMES + 1):
            owner.hold("moved", [_MOVED, 100], count)
            owner.hold("unused", [_MOVED], count)
            owner.expose("moved", count)
            for key in ("moved", "unused"):
                owner.unregister(key)
                owner.forget(key)
            if count == _FIRST:
                held = Held(owner)
        held.require_no_more(f"{_TIMES - _FIRST} generations that nobody has opened")

    def test_maps_leave_nothing_behind(self, harness: Harness) -> None:
        """WT-49, WT-51: on either side."""
        owner, reader = harness.owner(), harness.reader()
        for count in range(1, _TIMES + 1):
            owner.hold("moved", [_MOVED, 100], count)
            _open_and_map(reader, owner, "moved", count)
            reader.check(owner.name)
            assert reader.wrong_byte("mapped", count) is None
            reader.forget("mapped")
            reader.start_anew([100])
            owner.revoke(count)
            owner.unregister("moved")
            owner.forget("moved")
            if count == _FIRST:
                held = Held(owner, reader)
        held.require_no_more(f"{_TIMES - _FIRST} maps")


def _mapped(harness: Harness) -> tuple[EndpointProcess, EndpointProcess]:
    """An owner of ``weights``, exposed as generation 1; a reader that has it as ``mapped``."""
    owner, reader = harness.owner(), harness.reader()  # made at the same time
    owner.hold("weights", _SIZES, 1)
    _open_and_map(reader, owner, "weights", 1)
    return owner, reader


def _open_and_map(
    reader: EndpointProcess, owner: EndpointProcess, key: str, generation: int
) -> None:
    handle = owner.expose(key, generation)
    reader.open(owner.name, generation, handle, LONG_S, within=LONG_S + MOMENTS_S)
    reader.map("mapped", owner.name)


def _all_exposable(owner: EndpointProcess, key: str) -> bool:
    try:
        return all(owner.exposable(key))
    except WeightTransferError:  # it could be, if its owner saw to it
        return False


def _require_exposed(harness: Harness, owner: EndpointProcess, key: str, generation: int) -> None:
    """A reader has it where it is: what is written afterwards, too."""
    reader = harness.reader()
    _open_and_map(reader, owner, key, generation)
    assert reader.wrong_byte("mapped", generation) is None
    owner.write(key, 50 + generation)
    assert reader.wrong_byte("mapped", 50 + generation) is None


def _require_shown(
    readers: list[EndpointProcess], owners: list[EndpointProcess], seeds: tuple[int, ...]
) -> None:
    for reader in readers:
        for owner, seed in zip(owners, seeds, strict=True):
            assert reader.wrong_byte(owner.name, seed) is None


def _require_readable(reader: EndpointProcess) -> None:
    """Whatever is in it by now: reading it ends no process."""
    reader.wrong_byte("mapped", 1)


def _require_no_map(reader: EndpointProcess, owner: EndpointProcess) -> None:
    _require_refused(lambda: reader.map("none", owner.name))
    _require_refused(lambda: reader.check(owner.name))


def _require_refused(call: Callable[[], object]) -> None:
    with pytest.raises(WeightTransferError):
        call()


def _await_refusal(
    reader: EndpointProcess,
    owner: EndpointProcess,
    kinds: tuple[type[WeightTransferError], ...],
) -> None:
    def refused() -> bool:
        try:
            reader.check(owner.name)
        except kinds:
            return True
        return False

    until(refused, MOMENTS_S, "`check` passes for an owner that has gone")
