"""WT-37 to WT-40: round after round."""

from __future__ import annotations

from vllm_wt.testing.conformance.content import digests
from vllm_wt.testing.conformance.harness import LONG_S, Harness


class RoundChecks:
    def test_new_values_arrive_each_round(self, harness: Harness) -> None:
        """WT-37: and the same again when nothing has changed."""
        sync = harness.sync()
        for seed in (1, 2, 2, 3, 1):
            sync.trainer.write(seed)
            sync.push()
            assert sync.wrong(seed) is None
            assert sync.worker.version() == sync.version

    def test_one_byte_that_changed_arrives(self, harness: Harness) -> None:
        """WT-37: wherever it is."""
        sync = harness.sync()
        for name, index in (("head", -1), ("layer.weight", 70_001), ("scale", 0)):
            sync.push()
            sync.trainer.poke(name, index)
            sync.push()
            assert sync.worker.weights() == sync.trainer.digests()

    def test_the_trainer_s_tensors_are_not_written_to(self, harness: Harness) -> None:
        """WT-38"""
        for kind in ("few", "strided"):
            sync = harness.sync(kind=kind)
            sync.push()
            sync.push()
            assert sync.trainer.digests() == digests(kind, 1)

    def test_the_trainer_goes_on_once_the_round_is_sealed(self, harness: Harness) -> None:
        """WT-38"""
        sync = harness.sync()
        sync.begin()
        sync.open()
        sync.await_delivery()
        sync.step("seal")
        sync.trainer.pause()
        if harness.package().maps(
            within=LONG_S
        ):  # what is loaded from where it is stays until then
            sync.on_workers("finish", 5)
            sync.trainer.write(2)
        else:
            sync.trainer.write(2)
            sync.on_workers("finish", 5)
        assert sync.wrong(1) is None

    def test_memory_that_has_moved_arrives(self, harness: Harness) -> None:
        """WT-39"""
        sync = harness.sync()
        for seed in (1, 2, 3):
            sync.trainer.move(seed)
            sync.push()
            assert sync.wrong(seed) is None
        sync.trainer.write(4)
        sync.push()
        assert sync.wrong(4) is None

    def test_values_of_two_publishes_do_not_mix(self, harness: Harness) -> None:
        """WT-39: a round that is given up, and another with what has been written and moved since."""
        sync = harness.sync(kind="sizes")
        for seed, change in ((2, sync.trainer.write), (3, sync.trainer.move)):
            sync.give_up()
            change(seed, within=20.0)
            sync.push()
            assert sync.wrong(seed) is None

    def test_delivered_counts_those_that_have_everything(self, harness: Harness) -> None:
        """WT-40"""
        sync = harness.sync()
        assert sync.trainer.delivered() == 0
        for _ in range(2):
            sync.publish()
            assert sync.trainer.delivered() == 0
            sync.on_workers("start", 5)
            assert sync.trainer.delivered() == 0
            sync.trainer.serve()
            sync.open()
            sync.await_delivery()
            assert sync.trainer.delivered() == 1
            sync.step("seal")
            sync.trainer.pause()
            sync.on_workers("finish", 5)
        sync.publish()
        assert sync.trainer.delivered() == 0
