"""Ranks of a trainer that each broadcast what they hold of sharded tensors, over the real nccl backend.

Ranks with FSDP2 or DTensors over gloo, and engines of stand-in workers, are real processes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from processes import LOST, Forker, Group, until
from wt_ring import SHAPES, digest_of, full_tensors

pytestmark = pytest.mark.xdist_group("senders")

SCRIPT = Path(__file__).parents[1] / "support" / "wt_senders.py"
BUCKET = {"bucket_nbytes": 8192}
SOON_S = 2.0
"""A deadline that is waited for, and what ranks wait beyond it."""
MIB = 1 << 20


EACH_KIND = ["fsdp2", pytest.param("dtensor", marks=pytest.mark.slow)]
"""Where what the ranks do is the same for every kind."""


class Senders(Group):
    """All ranks of a trainer, and its engine of the backend."""

    dtype: torch.dtype | None = None

    def full(self, seed):
        """The oracle: the tensors before any rank had them."""
        full = full_tensors("small", seed)
        return {n: t if self.dtype is None else t.to(self.dtype) for n, t in full.items()}

    def assert_has(self, seed):
        full = self.full(seed).items()
        expected = {name: [str(t.dtype), list(t.shape), digest_of(t)] for name, t in full}
        workers = self.engine.call("digests")
        assert workers == [expected] * len(workers)

    def assert_shared(self, senders):
        """Each of so many ranks sends a part, and together all of it."""
        facts = self.all("facts")
        sent = [each["nbytes"] for each in facts]
        assert sum(sent) == sum(tensor.nbytes for tensor in self.full(1).values())
        assert [nbytes > 0 for nbytes in sent] == [rank < senders for rank in range(len(sent))]
        return sent


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("senders"), SCRIPT)
    yield forker
    forker.close()


@pytest.fixture
def make(forker):
    """Makes a trainer of ranks, and an engine of workers where there is none yet."""
    made = []

    def new(kind, world=3, workers=2, engine=None, size="small"):
        if engine is None:
            engine = forker.fork("engine", "nccl", workers, True)
            made.append(engine)
        engine.call("calls")
        group = Senders(forker, "nccl", world, engine)
        made.extend(group.ranks)
        group.all("make", kind, size, 1)
        return group

    yield new
    for process in made:
        process.close()


@pytest.fixture
def sharded(make):
    """Three ranks of FSDP2 that have pushed once, and wait for each other a short time only."""
    group = make("fsdp2")
    group.all("wait_less", SOON_S)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    return group


@pytest.fixture
def hold(tmp_path):
    """A rank does not send a bucket of the next push, nor goes on, before its file is gone."""
    flag = tmp_path / "held"

    def hold(rank, bucket):
        rank.call("hold", bucket, str(flag))
        return flag

    yield hold
    flag.unlink(missing_ok=True)


@pytest.mark.parametrize("senders", ["all", "rank0", None])
@pytest.mark.parametrize("kind", ["fsdp2", "dtensor", "copied"])
def test_three_pushes(make, kind, senders):
    group = make(kind)
    group.connect(**BUCKET, **({} if senders is None else {"senders": senders}))
    shared = senders == "all" or (senders is None and kind != "copied")
    group.assert_shared(3 if shared else 1)
    for version in (1, 2, 3):
        group.assert_pushes(version)
    assert group.ranks[0].call("versions") == [[3, False]]
    groups = [each["group"] for each in group.all("facts")]
    assert groups == [1, int(shared), int(shared)], "a communicator is kept"


@pytest.mark.parametrize(("world", "workers"), [(2, 1), (4, 3), (1, 2)])
@pytest.mark.parametrize("kind", ["fsdp2", "dtensor"])
def test_ranks_and_workers_of_other_numbers(make, kind, world, workers):
    group = make(kind, world, workers)
    group.connect(**BUCKET)
    group.assert_shared(world)
    for version in (1, 2):
        group.assert_pushes(version)


def test_nothing_is_gathered_where_each_rank_holds_a_run(make):
    group = make("fsdp2")
    group.connect(**BUCKET)
    group.all("gathers")
    group.assert_pushes(1)
    assert group.all("gathers") == [0, 0, 0]
    group.connect(**BUCKET, senders="rank0")
    group.all("gathers")
    group.assert_pushes(1)
    assert all(number >= len(SHAPES["small"]) - 1 for number in group.all("gathers"))


def test_memory(make):
    """A rank takes its ring, whatever the size of the model; no full tensor besides."""
    group = make("fsdp2", size="large", workers=1)
    group.connect(bucket_nbytes=MIB)
    tensor = 8 * MIB
    for version in (1, 2):
        measured = group.all("push_measured", version)
    assert [each["ring"] for each in group.all("facts")] == [4 * MIB] * 3
    for each in measured:  # of the second push: the ring is there before
        assert each["peak"] - each["before"] < tensor


def test_copies_of_shards_are_shared_too(make):
    """Of two ranks that hold the same, each sends about half."""
    group = make("hsdp", 4)
    group.connect(**BUCKET)
    sent = group.assert_shared(4)
    assert max(sent) < 2 * min(sent)
    group.all("gathers")
    for version in (1, 2):
        group.assert_pushes(version)
    assert group.all("gathers") == [0] * 4


def test_shards_are_cast_one_by_one(make):
    group = make("cast")
    group.dtype = torch.bfloat16
    group.connect(**BUCKET)
    group.assert_shared(3)
    group.all("gathers")
    for version in (1, 2):
        group.assert_pushes(version)
    assert group.all("gathers") == [0, 0, 0]


def test_the_others_go_on_while_one_rank_is_late(sharded, hold):
    """Each fills its buffers, since nobody gathers and nobody waits for a turn to pack."""
    group, late = sharded, 1
    flag = hold(group.ranks[late], 2)
    group.start("push_together", 2)
    until(flag.exists, "the bucket that is held")
    buckets = [each["buckets"] for each in group.ranks[0].call("plan")]
    ahead = [min(2 + 4 + 1, buckets[rank]) for rank in (0, 2)]
    assert min(ahead) > 3
    until(
        lambda: [group.ranks[rank].call("begun") for rank in (0, 2)] >= ahead,
        "the others to fill their buffers",
    )
    flag.unlink()
    assert group.outcomes() == [{"result": 2}] * 3
    group.assert_has(2)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [({"senders": "rank0"}, "E03"), ({"senders": "some"}, "E01"), ({"bucket_nbytes": 4096}, "E03")],
    ids=["senders differ", "no such senders", "buckets differ"],
)
@pytest.mark.parametrize("other", [0, 2])
def test_ranks_that_would_send_something_else(make, options, code, other):
    group = make("fsdp2")
    for number, rank in enumerate(group.ranks):
        its = BUCKET | (options if number == other else {})
        rank.call("launch", "connect_together", str(group.engine.path), "nccl", its)
    assert group.codes() == [code] * 3
    assert group.engine.call("calls") == []
    group.connect(**BUCKET)
    group.assert_pushes(1)


def test_all_senders_need_a_group(make):
    group = make("copied")
    first = group.ranks[:1]
    options = BUCKET | {"senders": "all"}
    arguments = str(group.engine.path), "nccl", options, 30.0, "none"
    group.start("connect_together", *arguments, ranks=first)
    (error,) = group.failed(first)
    assert (error["code"], error["where"]) == ("E01", "senders")


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_push_that_is_refused(make, kind):
    """On one rank, which the others hear of at once; the next one works."""
    group = make(kind)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    for rank, version in zip(group.ranks, (2, 2, -1), strict=True):
        rank.call("launch", "push_together", version)
    assert group.codes() == ["E01"] * 3
    group.assert_has(1)
    group.assert_pushes(5)


# -- what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["start", "open", "seal", "finish"])
@pytest.mark.parametrize("kind", EACH_KIND)
def test_an_engine_that_refuses(make, kind, step):
    group = make(kind)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.engine.call("refuse", step)
    group.start("push_together", 2)
    assert [(e["code"], e["what"]) for e in group.failed()] == [("E16", "The engine refuses")] * 3
    group.assert_has(1)
    group.assert_pushes(3)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_source_that_raises_in_the_middle(make, rank):
    group = make("made")
    group.connect(**BUCKET, senders="all")
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.ranks[rank].call("fail_at", "w6")
    group.start("push_together", 2)
    errors = group.failed()
    assert all("w6 is not to be had" in error["what"] for error in errors), errors
    group.assert_has(1)
    group.assert_pushes(3)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_has_lost_its_communicator(sharded, rank):
    """All make theirs anew, with the workers."""
    sharded.ranks[rank].call("lose")
    sharded.assert_pushes(2)
    assert [each["group"] for each in sharded.all("facts")] == [2] * 3
    sharded.assert_pushes(3)
    assert [each["group"] for each in sharded.all("facts")] == [2] * 3


@pytest.mark.parametrize("kind", EACH_KIND)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_mid_push(make, hold, kind, victim):
    """The others say so, the workers keep what they have, and a new trainer goes on."""
    group = make(kind)
    group.all("wait_less", SOON_S)
    group.connect(**BUCKET)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    dying = group.ranks[victim]
    survivors = [rank for rank in group.ranks if rank is not dying]
    flag = hold(dying, 1)
    group.start("push_together", 2, 5.0)
    until(flag.exists, "the bucket that is held")
    dying.signal(signal.SIGKILL)
    until(dying.dead, "a rank to die")
    assert set(group.codes(survivors)) <= LOST
    group.assert_has(1)
    other = make(kind, engine=group.engine)
    other.connect(**BUCKET)
    other.assert_pushes(1)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_in_mid_push(sharded, hold, victim):
    """It goes on when the others have given up, and connects again with them."""
    group = sharded
    stopped = group.ranks[victim]
    others = [rank for rank in group.ranks if rank is not stopped]
    flag = hold(stopped, 1)
    group.start("push_together", 2, SOON_S)
    until(flag.exists, "the bucket that is held")
    stopped.signal(signal.SIGSTOP)
    until(stopped.stopped, "a rank to stop")
    assert set(group.codes(others)) <= LOST
    stopped.signal(signal.SIGCONT)
    flag.unlink()
    assert set(group.codes([stopped])) <= LOST
    group.assert_has(1)
    group.connect(**BUCKET)
    group.assert_pushes(1)


def test_an_engine_that_is_killed_in_mid_push(sharded, hold, make):
    group = sharded
    flag = hold(group.ranks[1], 1)
    group.start("push_together", 2, 5.0)
    until(flag.exists, "the bucket that is held")
    group.engine.signal(signal.SIGKILL)
    until(group.engine.dead, "the engine to die")
    flag.unlink()
    assert set(group.codes()) <= LOST
    other = make("fsdp2", world=1)
    group.engine = other.engine
    group.connect(**BUCKET)
    group.assert_pushes(1)


def test_a_rank_that_does_not_push(sharded):
    group = sharded
    two = group.ranks[:2]
    group.start("push_together", 2, SOON_S, ranks=two)
    assert group.codes(two) == ["E05"] * 2
    group.assert_has(1)
