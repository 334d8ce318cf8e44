"""Sharded tensors, gathered bucket by bucket while a reader takes them, with real processes.

Trainer ranks with FSDP2 or DTensors over gloo, a reader without vLLM over the real rdma backend. What
the others do while the first rank pushes is `take_part`, and no more; their process group would wait
for ten minutes.
"""

from __future__ import annotations

import signal

import pytest
from processes import until
from wt_ring import SHAPES, digest_of, full_tensors

pytestmark = pytest.mark.xdist_group("ring")

BUCKET = 8192
MIB = 1 << 20


def assert_has(reader, size, seed):
    """The oracle: the tensors before they were sharded."""
    assert reader.call("digests") == {
        name: [str(tensor.dtype), list(tensor.shape), digest_of(tensor)]
        for name, tensor in full_tensors(size, seed).items()
    }


@pytest.fixture
def connected(trainer, reader):
    """A trainer of FSDP2 that has pushed once."""
    trainer.all("make", "fsdp2", "small", 1)
    facts = trainer.connect(reader, BUCKET)
    assert facts["buckets"] > 10 * facts["slots"]
    trainer.push()
    assert_has(reader, "small", 1)
    trainer.all("fill", 2)
    return trainer


def assert_good_round(trainer, reader):
    trainer.all("fill", 3)
    trainer.push()
    assert_has(reader, "small", 3)


@pytest.mark.parametrize("kind", ["fsdp2", "dtensor"])
def test_three_rounds(trainer, reader, kind):
    trainer.all("make", kind, "small", 1)
    orders = trainer.all("order")
    assert orders == [[f"w{index}" for index in range(len(SHAPES["small"]))]] * len(trainer.ranks)
    facts = trainer.connect(reader, BUCKET)
    packed = {f"w{index}" for index, shape in enumerate(SHAPES["small"]) if 0 not in shape}
    if kind == "dtensor":  # what is whole on each rank, and not strided, is read in place
        packed -= {"w2", "w8"}
    assert facts["packed"] == sorted(packed)
    for version in (1, 2, 3):
        trainer.all("fill", version)
        trainer.push()
        assert_has(reader, "small", version)


def test_memory(forker, new_reader):
    """The ring and what is being gathered, whatever the size of the model; the same in each round."""
    trainer, reader = forker.trainer(2), new_reader()
    trainer.all("make", "fsdp2", "large", 1)
    tensor = 8 * MIB
    model = tensor * len(SHAPES["large"])
    assert model > 300e6
    facts = trainer.connect(reader, 4 * MIB)
    assert facts["ring"] == 12 * MIB
    rounds = [trainer.push() for _ in range(3)]
    assert_has(reader, "large", 1)
    slack = 4 * MIB  # whatever else gloo and UCX take
    for of_round in rounds:
        # The ring is there before.
        assert of_round["peak"] - of_round["before"] < 2 * tensor + slack < model / 8
    afters = [of_round["after"] for of_round in rounds[1:]]
    assert max(afters) - min(afters) < slack
    peaks = [of_round["peak"] for of_round in rounds[1:]]
    assert max(peaks) - min(peaks) < slack
    trainer.close()


@pytest.mark.parametrize("polls", [True, False], ids=["asked", "not asked"])
def test_a_reader_that_is_stopped(connected, new_reader, polls):
    """The ring is filled, and no more is made; the push ends in time, whether or not the engine was
    asked meanwhile, and so does every rank's walk."""
    trainer, reader = connected, new_reader()
    facts = trainer.connect(reader, BUCKET, polls=polls)
    reader.call("signal_at", 5, int(signal.SIGSTOP))
    trainer.start_push(3.0)
    until(reader.stopped, "the reader to stop")
    ahead = 5 + facts["slots"]
    until(lambda: trainer.first.call("ready") == ahead, "the ring to be full")
    error = trainer.failure()
    assert trainer.first.call("ready") == ahead < facts["buckets"]
    assert error["code"] == "E05"
    assert error["what"] == "The workers have not read what is before this in time"
    assert error["where"] == f"bucket {ahead} of {facts['buckets']}"
    assert error["cure"]
    reader.signal(signal.SIGCONT)
    assert reader.call("digests") == {}
    assert_good_round(trainer, reader)


def test_a_reader_that_is_killed(connected, new_reader):
    trainer, reader = connected, new_reader()
    facts = trainer.connect(reader, BUCKET)
    reader.call("signal_at", 5, int(signal.SIGKILL))
    trainer.start_push(5.0)
    until(reader.dead, "the reader to die")
    error = trainer.failure()
    assert (error["code"], error["cure"] != "") == ("E04", True)
    assert trainer.first.call("ready") <= 5 + facts["slots"] < facts["buckets"]
    other = new_reader()
    trainer.connect(other, BUCKET)
    assert_good_round(trainer, other)


@pytest.mark.parametrize("step", ["start", "open", "seal"])
def test_an_engine_that_refuses(connected, reader, step):
    """Before anything is sent, or when all of it is."""
    trainer = connected
    reader.call("refuse", step)
    trainer.start_push()
    error = trainer.failure()
    assert (error["code"], error["what"]) == ("E16", "The engine refuses")
    assert_has(reader, "small", 1)
    assert_good_round(trainer, reader)


def test_a_rank_that_does_not_take_part(forker, reader):
    """The push ends in time, and no later one takes what that rank may still send."""
    trainer = forker.trainer(2)
    trainer.all("make", "fsdp2", "small", 1)
    trainer.connect(reader, BUCKET)
    trainer.push()
    trainer.all("fill", 2)
    for version, (code, what) in enumerate(
        [("E05", "Tensor 'w0' was not gathered in time"), ("E10", "Tensor 'w0' is spread over")], 2
    ):
        trainer.first.call("launch", "push", version, 3.0)
        error = until(lambda: trainer.first.call("outcome"), "the end of the push")["error"]
        assert (error["code"], error["what"].startswith(what)) == (code, True)
        assert trainer.first.call("versions") == [[1, False]]
        assert_has(reader, "small", 1)
    trainer.close()
