"""Ranks of a trainer that each hold a part of the weights, and engines that take what they need."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from processes import LOST, Forker, Group, until

from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("sharded")]

SCRIPT = Path(__file__).parents[1] / "support" / "wt_sharded.py"
SOON_S = 2.0
"""What ranks wait beyond a deadline."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("shards"), SCRIPT)
    yield forker
    forker.close()


@pytest.fixture(params=[2, pytest.param(1, marks=pytest.mark.slow)], ids=["tp2", "tp1"])
def engine(request, engines):
    return engines.get("sharded", request.param)


class Ranks(Group):
    """Of a trainer, whose weights are the engine's."""

    def __init__(self, forker, engine, kind, world):
        super().__init__(forker, "sharded", world, engine)
        self.path = str(engine.folder / "engine.sock")
        self.all("wait_less", SOON_S)
        self.all("make_model", kind, asdict(engine.shape))

    def connect(self, **options):
        self.all("connect_together", self.path, "sharded", options)

    def assert_syncs(self, version, seed):
        """The engine generates what transformers does, and every rank says that it has this version."""
        self.all("fill", seed)
        self.push(version)
        model = random_model(self.engine.shape, seed=0)
        randomize(model, seed)
        checkpoint = self.engine.folder / f"full{seed}"
        save_checkpoint(model, checkpoint)
        assert self.engine.tokens() == self.engine.reference(checkpoint)
        assert self.engine.llm.get_weight_version() == str(version)
        states = self.engine.state()
        tp = self.engine.tp
        assert [(s["state"], s["version"]) for s in states] == [("idle", version)] * tp
        self.engine.assert_in_step()


@pytest.fixture
def make(forker, engine):
    """Makes trainers of the engine."""
    made = []

    def new(kind="fsdp2", world=2):
        made.append(Ranks(forker, engine, kind, world))
        return made[-1]

    yield new
    for ranks in made:
        for rank in ranks.ranks:
            rank.close()


QUICK = {("fsdp2", 3, "rdma"), ("columns", 2, "ipc")}
EACH = [
    pytest.param(*case, over, marks=[] if (*case, over) in QUICK else pytest.mark.slow)
    for case in [("fsdp2", 2), ("fsdp2", 3), ("columns", 2), ("layers", 2)]
    for over in ("rdma", "ipc")
]


@pytest.mark.parametrize(("kind", "world", "over"), EACH)
def test_three_pushes(make, engine, kind, world, over):
    ranks = make(kind, world)
    ranks.connect(over=over)
    ranks.all("gathers")
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        ranks.assert_syncs(version, 1000 * world + 100 * len(kind) + 10 * len(over) + version)
        assert engine.tokens() not in seen
        seen.append(engine.tokens())
    assert ranks.all("gathers") == [0] * world


def test_a_step_of_learning_rate_0_changes_nothing(make, engine):
    ranks = make()
    ranks.connect()
    ranks.assert_syncs(1, 700)
    before = engine.tokens(), engine.checksums()
    ranks.all("step", 0.0)
    ranks.push(2)
    assert (engine.tokens(), engine.checksums()) == before
    assert [s["version"] for s in engine.state()] == [2] * engine.tp
    ranks.all("step", 0.1)
    ranks.push(3)
    assert engine.checksums() != before[1]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed(make, engine, victim):
    """The living say so in time, the engine serves its old weights, and a new trainer goes on."""
    ranks = make()
    ranks.connect()
    ranks.assert_syncs(1, 500)
    old, digests = engine.tokens(), engine.checksums()
    dying = ranks.ranks[victim]
    others = [rank for rank in ranks.ranks if rank is not dying]
    dying.signal(signal.SIGKILL)
    until(dying.dead, "a rank to die")
    ranks.start("push_together", 2, 5.0, ranks=others)
    assert set(ranks.codes(others)) <= LOST
    engine.assert_in_step()
    assert (engine.tokens(), engine.checksums()) == (old, digests)
    other = make("columns")
    other.connect()
    other.assert_syncs(1, 502)
