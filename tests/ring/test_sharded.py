"""Ranks of a trainer that each hold a part of the weights, and workers that take what they need of it.

Ranks, and engines of stand-in workers, are real processes over gloo and the real backends.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from processes import LOST, Forker, Group, until
from wt_ring import digest_of, full_tensors
from wt_sharded import part_of

pytestmark = pytest.mark.xdist_group("sharded ring")

SCRIPT = Path(__file__).parents[1] / "support" / "wt_sharded.py"
BUCKET = {"bucket_nbytes": 8192}
SOON_S = 2.0
"""A deadline that is waited for, and what ranks wait beyond it."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("sharded"), SCRIPT)
    yield forker
    forker.close()


class Shards(Group):
    """Ranks, and an engine of which each worker takes a part."""

    def __init__(self, forker, engine, kind, world, takes):
        super().__init__(forker, "sharded", world, engine)
        self._kind, self._takes = kind, takes
        self.all("make", kind, "small", 1)

    def expected(self, seed, worker, workers):
        """The oracle: the tensors before any rank had them."""
        found = {}
        for index, (name, full) in enumerate(full_tensors("small", seed).items()):
            sent = {"cast": torch.bfloat16, "float": torch.float32}
            tensor = full.to(sent.get(self._kind, full.dtype))
            if self._takes != "all":
                at = part_of(self._takes, index, tuple(tensor.shape), worker, workers)
                if at is None:
                    continue
                tensor = tensor[at]
            found[name] = [str(tensor.dtype), list(tensor.shape), digest_of(tensor)]
        return found

    def assert_has(self, seed):
        got = self.engine.call("digests")
        assert got == [self.expected(seed, worker, len(got)) for worker in range(len(got))]

    def read(self):
        """Of each worker the ranks that it reads."""
        owners = self.all("owner")
        facts = self.engine.call("facts")
        return [[owners.index(o) for o in each["owner"].split(",") if o] for each in facts]


@pytest.fixture
def make(forker):
    """Makes a trainer of ranks, and an engine of workers unless there is one."""
    made = []

    def new(kind="fsdp2", world=2, workers=2, takes="parts", engine=None):
        if engine is None:
            engine = forker.fork("engine", "sharded", workers, takes)
            engine.call("calls")
            made.append(engine)
        group = Shards(forker, engine, kind, world, takes)
        made.extend(group.ranks)
        return group

    yield new
    for process in made:
        process.close()


@pytest.fixture(params=["ipc", "rdma", pytest.param("nccl_p2p", marks=pytest.mark.slow)])
def over(request):
    return request.param


@pytest.mark.parametrize("takes", ["parts", "all"])
@pytest.mark.parametrize(
    ("kind", "world"),
    [("fsdp2", 2), ("fsdp2", 3), ("columns", 2), ("columns", 3), ("dtensor", 2), ("hsdp", 4)],
)
def test_three_pushes(make, over, kind, world, takes):
    """What is sent is of sizes that neither two nor three divides; nothing is gathered."""
    group = make(kind, world, takes=takes)
    group.connect(over=over, **BUCKET)
    group.all("gathers")
    for version in (1, 2, 3):
        group.assert_pushes(version)
    assert group.all("gathers") == [0] * world
    assert group.ranks[0].call("versions") == [[3, False]]
    assert [each["staging"] for each in group.engine.call("facts")] == ["device"] * 2
    assert group.read() == [[*range(world)]] * 2


@pytest.mark.parametrize(("kind", "world"), [("cast", 2), ("cast", 3), ("copied", 2)])
def test_what_is_cast_and_what_every_rank_has(make, over, kind, world):
    group = make(kind, world)
    group.connect(over=over, **BUCKET)
    group.all("gathers")
    for version in (1, 2, 3):
        group.assert_pushes(version)
    assert group.all("gathers") == [0] * world
    assert group.read() == [[*range(world)]] * 2


@pytest.mark.parametrize(("kind", "world"), [("fsdp2", 2), ("fsdp2", 3), ("columns", 2)])
def test_nobody_has_memory_for_a_full_tensor(make, over, kind, world):
    """There is one of 164 MB. Each rank has its part, and a worker receives no more than its own."""
    group = make(kind, world)
    group.all("make", kind, "huge", 1)
    group.connect(over=over)
    full = max(tensor.nbytes for tensor in full_tensors("huge", 1).values())
    for version in (1, 2):
        group.all("fill", version)
        grown = group.all("grown", version)
        assert max(grown) < full / 4, f"{[round(each / 1e6) for each in grown]} MB"
    for worker in group.engine.call("facts"):
        assert full / 2 <= worker["needed_nbytes"] < full / 2 + (1 << 20)
    digests = group.engine.call("digests")
    assert digests == [
        {
            name: [str(part.dtype), list(part.shape), digest_of(part)]
            for index, (name, tensor) in enumerate(full_tensors("huge", 2).items())
            for part in [tensor[part_of("parts", index, tuple(tensor.shape), worker, 2)]]
        }
        for worker in range(2)
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_of_other_numbers(make, over, workers):
    group = make("columns", 2, workers)
    group.connect(over=over)
    for version in (1, 2):
        group.assert_pushes(version)


@pytest.mark.parametrize("verify", ["bytes", "off"])
def test_less_is_compared(make, verify):
    group = make("columns", 3)
    group.connect(verify=verify)
    for version in (1, 2):
        group.assert_pushes(version)


def test_a_rank_of_which_nobody_needs_anything(make, over):
    group = make("turns", takes="even")
    group.connect(over=over)
    for version in (1, 2, 3):
        group.assert_pushes(version)
    assert group.read() == [[0], [0]]
    assert "w1" not in group.engine.call("digests")[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_moved(make, over, rank):
    """Between rounds, of one rank, and then of all."""
    group = make("columns")
    group.connect(over=over)
    group.assert_pushes(1)
    group.ranks[rank].call("move")
    group.assert_pushes(2)
    group.all("move")
    group.assert_pushes(3)
    group.assert_pushes(4)


def test_a_module_that_a_forward_has_left_gathered(make, over):
    """It is put back into shards, before the first round and between rounds."""
    group = make("float")
    for version in (1, 2, 3):
        group.all("fill", version)
        group.all("unshard")
        if version == 1:
            group.connect(over=over)
        group.push(version)
        group.assert_has(version)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_holds_something_else_than_before(make, over, rank):
    """All ranks are refused, the workers keep what they have, and a new connection goes by what is."""
    group = make("columns", 3)
    group.connect(over=over)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.ranks[rank].call("change", "layout")
    group.start("push_together", 2)
    errors = group.failed()
    assert [error["code"] for error in errors] == ["E03"] * 3
    assert all("does not hold what it did" in error["what"] for error in errors)
    assert all(f"rank {rank}" in error["where"] for error in errors)
    group.assert_has(1)
    group.connect(over=over)
    group.assert_pushes(1)
    group.assert_pushes(2)


@pytest.mark.parametrize("step", ["start", "open", "seal", "finish"])
def test_an_engine_that_refuses(make, step):
    group = make("columns")
    group.connect()
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    group.engine.call("refuse", step)
    group.start("push_together", 2)
    assert group.codes() == ["E16", "E16"]
    group.assert_has(1)
    group.assert_pushes(3)


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize(("kind", "victim"), [("columns", 0), ("columns", 2), ("cast", 1)])
def test_a_rank_that_is_killed(make, over, kind, victim, when):
    """The living hear of it in time, the engine has its old weights, and a new trainer goes on."""
    group = make(kind, 3)
    group.all("wait_less", SOON_S)
    group.connect(over=over)
    group.assert_pushes(1, seed=1)
    group.all("fill", 2)
    dying = group.ranks[victim]
    living = [rank for rank in group.ranks if rank is not dying]
    if when == "before":
        dying.signal(signal.SIGKILL)
        until(dying.dead, "a rank to die")
        group.start("push_together", 2, SOON_S, ranks=living)
    else:
        group.engine.call("signal_at", "open", dying.pid, int(signal.SIGKILL))
        group.start("push_together", 2, 2 * SOON_S)
        until(dying.dead, "a rank to die")
    assert set(group.codes(living)) <= LOST
    group.assert_has(1)
    other = make(kind, 2, engine=group.engine)
    other.connect(over=over)
    other.assert_pushes(1)


def test_ranks_of_one_trainer_that_would_move_bytes_differently(make):
    group = make("columns")
    for rank, name in zip(group.ranks, ("ipc", "rdma"), strict=True):
        options = {"over": name}
        rank.call("launch", "connect_together", str(group.engine.path), "sharded", options)
    assert group.codes() == ["E03", "E03"]
    assert group.engine.call("calls") == []
    group.connect(over="ipc")
    group.assert_pushes(1)
