"""WT-24 to WT-28: what a Transport may do beyond one owner and one reader."""

from __future__ import annotations

import pytest

from vllm_wt.errors import WeightTransferError
from vllm_wt.spec import Capability
from vllm_wt.testing.conformance.gate import needs, transports_only
from vllm_wt.testing.conformance.harness import LONG_S, Harness, at_once, until
from vllm_wt.testing.conformance.process import MOMENTS_S

_LARGE = 8 << 20


@transports_only
class ManyChecks:
    @needs(Capability.MANY_READERS)
    def test_many_readers_at_a_time(self, harness: Harness) -> None:
        """WT-24"""
        owner = harness.owner([_LARGE])
        readers = [harness.reader_of(owner, 1, [_LARGE]) for _ in range(6)]
        assert at_once([*readers], "read", LONG_S + MOMENTS_S, "plan") == [_LARGE] * 6
        for reader in readers:
            assert reader.wrong_byte("arena", 1, within=LONG_S) is None
        at_once([*readers], "notify", MOMENTS_S, owner.name, 1)
        names = sorted(reader.name for reader in readers)
        until(lambda: owner.readers(1) == names, MOMENTS_S, "the owner has not heard all readers")

    @needs(Capability.MANY_OWNERS)
    def test_many_owners_in_a_plan(self, harness: Harness) -> None:
        """WT-25"""
        reader = harness.reader([200_000])
        copies, owned, owners = [], {}, []
        for index in range(3):
            owner = harness.owner([40_000, 20_000], 10 * index)
            owners.append(owner)
            reader.open(owner.name, 1, owner.expose("weights", 1), LONG_S)
            owned[owner.name] = [[40_000, 10 * index], [20_000, 10 * index + 1]]
            copies += [
                [owner.name, 0, 100, 0, 61_000 * index, 39_000],
                [owner.name, 1, 0, 0, 61_000 * index + 40_000, 20_000],
            ]
        reader.prepare("plan", "arena", copies)
        assert reader.read("plan") == 3 * 59_000
        assert reader.wrong_copy("arena", copies, owned) is None
        owners[1].revoke(1)
        with pytest.raises(WeightTransferError):
            reader.read("plan")

    @needs(Capability.ZERO_COPY)
    def test_serving_takes_no_second_copy(self, harness: Harness) -> None:
        """WT-26"""
        nbytes = 12 * _LARGE
        owner = harness.owner([nbytes])
        before = owner.reset_peak()
        reader = harness.reader_of(owner, 1, [nbytes])
        assert reader.read("plan", within=LONG_S + MOMENTS_S) == nbytes
        grown = owner.peak() - before
        assert grown < nbytes // 4, f"{grown >> 20} MiB more while {nbytes >> 20} MiB were read"

    @needs(Capability.CUDA)
    def test_memory_of_a_device(self, harness: Harness) -> None:
        """WT-27: on a device, and from the host to a device unless that is mapped."""
        device, host = harness.on("cuda"), harness.on("cpu")
        for owner_side in (device, host):
            owner = owner_side.owner([_LARGE])
            if owner_side is host and owner.maps():
                continue
            reader = device.reader_of(owner, 1, [_LARGE])
            for seed in (1, 2):
                owner.write("weights", seed, within=LONG_S)
                assert reader.read("plan", within=LONG_S + MOMENTS_S) == _LARGE
                assert reader.wrong_byte("arena", seed, within=LONG_S) is None
