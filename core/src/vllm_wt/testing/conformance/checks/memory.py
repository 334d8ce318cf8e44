"""WT-04 to WT-07: memory that a Transport registers, exposes and gives back."""

from __future__ import annotations

import pytest

from vllm_wt.errors import Revoked, WeightTransferError
from vllm_wt.testing.conformance.gate import transports_only
from vllm_wt.testing.conformance.harness import LONG_S, Harness

_HANDLE_PER_BUFFER = 1024
_HANDLE = 64 << 10


@transports_only
class MemoryChecks:
    def test_memory_is_read_where_it_is(self, harness: Harness) -> None:
        """WT-04: what is written after register and expose is what a reader reads."""
        owner, reader = harness.connected(seed=1)
        owner.write("weights", 2)
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 2) is None
        assert owner.wrong_byte("weights", 2) is None

    def test_regions_live_side_by_side(self, harness: Harness) -> None:
        """WT-04"""
        owner = harness.owner()
        regions = {"one": [1000], "two": [7, 2000, 1], "three": [500]}
        for number, (key, sizes) in enumerate(regions.items(), start=1):
            owner.hold(key, sizes, 10 * number)
            owner.expose(key, number)
        for number, (key, sizes) in enumerate(regions.items(), start=1):
            reader = harness.reader_of(owner, number, sizes, key)
            assert reader.read("plan") == sum(sizes)
            assert reader.wrong_byte("arena", 10 * number) is None

    def test_memory_that_was_registered_can_be_resized(self, harness: Harness) -> None:
        """WT-04"""
        owner, reader = harness.connected()
        assert reader.read("plan") == 100_000
        owner.hold("others", [1000], 1, "private")  # what a transport maps may be of a fixed size
        for process, key in ((owner, "weights"), (owner, "others"), (reader, "arena")):
            process.unregister(key)
            process.offload(key)

    def test_memory_that_cannot_be_registered_is_refused(self, harness: Harness) -> None:
        """WT-05"""
        owner, reader = harness.connected()
        for form in ("empty", "strided", "elsewhere"):
            with pytest.raises(WeightTransferError):
                owner.register_odd(form)
            with pytest.raises(WeightTransferError):
                reader.register_odd(form)
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 1) is None

    def test_what_was_unregistered_is_out_of_reach(self, harness: Harness) -> None:
        """WT-06: on the owner."""
        owner, reader = harness.connected()
        assert reader.read("plan") == 100_000
        reader.fill("arena", 0)
        owner.unregister("weights")
        with pytest.raises(WeightTransferError):
            reader.read("plan")
        assert reader.not_filled("arena", 0) is None

    def test_one_region_goes_and_the_other_stays(self, harness: Harness) -> None:
        """WT-06, WT-17: what is revoked or unregistered is that, and nothing else."""
        owner = harness.owner()
        for number in (1, 2, 3):
            owner.hold(f"region{number}", [1000], number)
            owner.expose(f"region{number}", number)
        readers = [harness.reader_of(owner, n, [1000], f"region{n}") for n in (1, 2, 3)]
        owner.revoke(1)
        owner.unregister("region3")
        for reader in (readers[0], readers[2]):
            with pytest.raises(WeightTransferError):
                reader.read("plan")
        assert readers[1].read("plan") == 1000
        assert readers[1].wrong_byte("arena", 2) is None

    def test_memory_is_registered_again(self, harness: Harness) -> None:
        """WT-06"""
        owner = harness.owner([100_000])
        owner.expose("weights", 1)
        owner.revoke(1)
        owner.unregister("weights")
        owner.register("weights")
        reader = harness.reader_of(owner, 2, [100_000])
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 1) is None

    def test_a_plan_ends_with_the_reader_s_memory(self, harness: Harness) -> None:
        """WT-06: on the reader."""
        _, reader = harness.connected()
        assert reader.read("plan") == 100_000
        reader.unregister("arena")
        reader.fill("arena", 0)
        with pytest.raises(WeightTransferError):
            reader.read("plan")
        assert reader.not_filled("arena", 0) is None

    def test_memory_that_was_unregistered_is_freed(self, harness: Harness) -> None:
        """WT-06"""
        owner = harness.owner([100])
        owner.expose("weights", 1)
        size = 16 << 20
        for generation in range(2, 14):
            if generation == 4:
                before = owner.resources()["MiB"]
            owner.hold("more", [size], generation)
            owner.expose("more", generation)
            owner.revoke(generation)
            owner.unregister("more")
            owner.forget("more")
        grown = owner.resources()["MiB"] - before
        assert grown < 48, f"{grown} MiB more after 10 regions of 16 MiB have gone"

    def test_a_handle_is_had_again(self, harness: Harness) -> None:
        """WT-07"""
        owner = harness.owner([1000])
        for _ in range(2):
            assert harness.reader_of(owner, 1, [1000]).read("plan") == 1000

    def test_a_handle_is_of_moderate_size(self, harness: Harness) -> None:
        """WT-07"""
        owner = harness.owner([64] * 2000)
        nbytes = len(owner.expose("weights", 1, within=LONG_S)) * 3 // 4
        assert nbytes < _HANDLE + 2000 * _HANDLE_PER_BUFFER

    def test_a_generation_names_one_region(self, harness: Harness) -> None:
        """WT-07"""
        owner = harness.owner([1000])
        owner.expose("weights", 1)
        owner.hold("others", [100_000], 5)
        with pytest.raises(WeightTransferError):
            owner.expose("others", 1)
        owner.revoke(1)
        with pytest.raises(Revoked):
            owner.expose("weights", 1)
        reader = harness.reader_of(owner, 2, [100_000], "others")
        assert reader.read("plan") == 100_000
        assert reader.wrong_byte("arena", 5) is None
