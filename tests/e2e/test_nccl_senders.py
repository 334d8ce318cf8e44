"""Three ranks of a trainer with FSDP2 send to a real engine of two workers: all of them, or one."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from processes import LOST, Forker, Group, until

from vllm_wt.testing.models import random_model, randomize, save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("nccl")]

SCRIPT = Path(__file__).parents[1] / "support" / "wt_senders.py"
BUCKETS = {"bucket_nbytes": 16 << 10}
"""Small ones, so that each rank has several."""
SOON_S = 2.0
"""What ranks wait beyond a deadline."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("ranks"), SCRIPT)
    yield forker
    forker.close()


@pytest.fixture
def engine(engines):
    return engines.get("nccl", 2)


class Ranks(Group):
    """Of a trainer, whose weights are the engine's."""

    def __init__(self, forker, engine):
        super().__init__(forker, "nccl", 3, engine)
        self.path = str(engine.folder / "engine.sock")
        self.all("wait_less", SOON_S)
        self.all("make_model", "fsdp2", asdict(engine.shape))

    def connect(self, **options):
        self.all("connect_together", self.path, "nccl", BUCKETS | options)

    def assert_syncs(self, version, seed, then=None):
        """The engine generates what transformers does, and every rank says that it has this version."""
        self.all("fill", seed)
        if then is not None:
            self.all(then)
        self.push(version)
        model = random_model(self.engine.shape, seed=0)
        randomize(model, seed)
        checkpoint = self.engine.folder / f"full{seed}"
        save_checkpoint(model, checkpoint)
        assert self.engine.tokens() == self.engine.reference(checkpoint)
        assert self.engine.llm.get_weight_version() == str(version)
        states = self.engine.state()
        assert [(s["state"], s["version"]) for s in states] == [("idle", version)] * 2
        self.engine.assert_in_step()


@pytest.fixture
def make(forker, engine):
    """Makes trainers of the engine."""
    made = []

    def new():
        made.append(Ranks(forker, engine))
        return made[-1]

    yield new
    for ranks in made:
        for rank in ranks.ranks:
            rank.close()


@pytest.mark.parametrize(
    ("options", "senders", "gathers"),
    [
        ({"senders": "all"}, 3, False),
        ({"senders": "rank0"}, 1, True),
        ({"staging": "device", "verify": "bytes"}, 3, False),
    ],
    ids=["all", "rank0", "by default"],
)
def test_three_pushes(make, engine, options, senders, gathers):
    ranks = make()
    ranks.connect(**options)
    facts = ranks.all("facts")
    assert [each["senders"] for each in facts] == [senders] * 3
    assert [each["nbytes"] > 0 for each in facts] == [True, senders > 1, senders > 1]
    seen = [engine.tokens()]
    ranks.all("gathers")
    for version in (1, 2, 3):
        ranks.assert_syncs(version, 100 * senders + version)
        assert engine.tokens() not in seen
        seen.append(engine.tokens())
        assert [number > 0 for number in ranks.all("gathers")] == [gathers] * 3


@pytest.mark.parametrize("steps", [("forward", "reshard"), ("reshard", "forward")])
def test_a_model_that_is_gathered_or_not(make, engine, steps):
    """FSDP2 leaves the root's parameters so after a forward, until the next one or a reshard."""
    ranks = make()
    if steps[0] == "reshard":
        ranks.all("forward")
    ranks.connect(senders="all")
    for version, step in enumerate(steps, 1):
        if step == "reshard":  # so that what is filled is what will be sent
            ranks.all("reshard")
        ranks.assert_syncs(version, 600 + version, "forward" if step == "forward" else None)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("senders", ["all", pytest.param("rank0", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_mid_push(make, engine, tmp_path, senders, victim):
    """The living say so in time, the engine serves its old weights, and a new trainer goes on."""
    ranks = make()
    ranks.connect(senders=senders)
    ranks.assert_syncs(1, 500)
    old, digests = engine.tokens(), engine.checksums()
    ranks.all("fill", 501)
    dying = ranks.ranks[victim]
    others = [rank for rank in ranks.ranks if rank is not dying]
    flag = tmp_path / "held"
    holding = ranks.ranks[0] if senders == "rank0" else dying
    holding.call("hold", 1, str(flag))
    ranks.start("push_together", 2, 5.0)
    until(flag.exists, "the bucket that is held")
    assert [state["state"] for state in engine.state()] == ["receiving"] * 2
    dying.signal(signal.SIGKILL)
    until(dying.dead, "a rank to die")
    flag.unlink()
    assert set(ranks.codes(others)) <= LOST
    engine.assert_in_step()
    assert (engine.tokens(), engine.checksums()) == (old, digests)
    other = make()
    other.connect(senders=senders)
    other.assert_syncs(1, 502)
