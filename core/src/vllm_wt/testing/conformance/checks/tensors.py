"""WT-32 to WT-36: what arrives."""

from __future__ import annotations

from vllm_wt.testing.conformance.content import tensors
from vllm_wt.testing.conformance.harness import LONG_S, Harness


class TensorChecks:
    def test_every_dtype_arrives_bit_for_bit(self, harness: Harness) -> None:
        """WT-32"""
        _require_arrives(harness, "dtypes")

    def test_scalars_arrive(self, harness: Harness) -> None:
        """WT-33"""
        _require_arrives(harness, "scalars")

    def test_tensors_without_elements_arrive(self, harness: Harness) -> None:
        """WT-33"""
        _require_arrives(harness, "empty")

    def test_tensors_that_are_not_contiguous_arrive(self, harness: Harness) -> None:
        """WT-33"""
        _require_arrives(harness, "strided")

    def test_tensors_that_share_memory_arrive(self, harness: Harness) -> None:
        """WT-33"""
        _require_arrives(harness, "tied")

    def test_large_and_odd_tensors_arrive(self, harness: Harness) -> None:
        """WT-34"""
        _require_arrives(harness, "sizes")

    def test_ten_thousand_tensors_arrive(self, harness: Harness) -> None:
        """WT-35"""
        _require_arrives(harness, "many")

    def test_each_is_given_once_in_order(self, harness: Harness) -> None:
        """WT-36"""
        for kind in ("few", "strided"):
            sync = harness.sync(kind=kind)
            sync.push()
            assert sync.worker.names() == list(tensors(kind, 1))


def _require_arrives(harness: Harness, kind: str) -> None:
    sync = harness.sync(kind=kind)
    sync.push(2 * LONG_S)
    assert sync.wrong(1) is None
    assert sync.worker.names() == list(tensors(kind, 1))
