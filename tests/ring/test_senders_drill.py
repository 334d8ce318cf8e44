"""A peer is killed in each phase of a round, ten times: the others say so in time, and go on.

``make test-all ARGS=tests/ring/test_senders_drill.py``; VLLM_WT_DRILL_KILLS sets another number.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from processes import LOST, Forker, Group, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("senders")]

SCRIPT = Path(__file__).parents[1] / "support" / "wt_senders.py"
BUCKET = {"bucket_nbytes": 8192}
KILLS = int(os.environ.get("VLLM_WT_DRILL_KILLS", "10"))
DEADLINE_S = 5.0
SOON_S = 2.0
"""What ranks wait for each other beyond a deadline."""
STEPS = ("init", "start", "open", "wire", "seal", "finish", "confirm")
"""Calls that the engine gets when the peer dies; `wire` lies between open and seal."""
VICTIMS = {"rank 0": 0, "rank 2": 2, "engine": None}


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("drill"), SCRIPT)
    yield forker
    forker.close()


class Drill:
    """Ranks with FSDP2 and an engine; whoever was killed is replaced."""

    def __init__(self, forker, folder):
        self._forker = forker
        self._folder = folder
        self._flags = 0
        self.engine = self._new_engine()
        self.group = self._new_group()

    def kill(self, victim, step, bucket):
        """Kill a peer at a step of the second push; the outcomes of the ranks that live."""
        group = self.group
        dying = self.engine if victim is None else group.ranks[victim]
        living = [rank for rank in group.ranks if rank is not dying]
        if step != "init":
            group.connect(**BUCKET)
            group.assert_pushes(1, seed=1)
            group.all("fill", 2)
        if step == "wire":
            self._kill_within(dying, victim or 0, bucket)
        else:
            self.engine.call("signal_at", step, dying.pid, signal.SIGKILL)
            if step == "init":
                options = (str(self.engine.path), "nccl", BUCKET, DEADLINE_S)
                group.start("connect_together", *options)
            else:
                group.start("push_together", 2, DEADLINE_S)
            until(dying.dead, "a peer to die")
        outcomes = group.outcomes(living, DEADLINE_S + SOON_S)
        if step != "init" and victim is not None:
            self._assert_whole()
        dying.close()
        if victim is None:
            group.engine = self.engine = self._new_engine()
        else:
            for rank in living:
                rank.close()
            self.group = self._new_group()
        return outcomes

    def assert_goes_on(self):
        self.group.connect(**BUCKET)
        self.group.assert_pushes(1, seed=3)

    def close(self):
        for process in (*self.group.ranks, self.engine):
            process.close()

    def _kill_within(self, dying, rank, bucket):
        self._flags += 1
        flag = self._folder / f"held{self._flags}"
        self.group.ranks[rank].call("hold", bucket, str(flag))
        self.group.start("push_together", 2, DEADLINE_S)
        until(flag.exists, "the bucket that is held")
        dying.signal(signal.SIGKILL)
        until(dying.dead, "a peer to die")
        flag.unlink()

    def _assert_whole(self):
        """All workers have the weights of one version."""
        states = [each["state"] for each in self.engine.call("facts")]
        version, *others = [each["version"] for each in self.engine.call("facts")]
        assert others == [version] * len(others), states
        self.group.assert_has({1: 1, 2: 2}[version])

    def _new_engine(self):
        engine = self._forker.fork("engine", "nccl", 2, True)
        engine.call("calls")  # it is there
        return engine

    def _new_group(self):
        group = Group(self._forker, "nccl", 3, self.engine)
        group.all("wait_less", SOON_S)
        group.all("make", "fsdp2", "small", 1)
        return group


@pytest.fixture(scope="module")
def drill(forker, tmp_path_factory):
    drill = Drill(forker, tmp_path_factory.mktemp("flags"))
    yield drill
    drill.close()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_peer_is_killed_ten_times(drill, victim, step):
    moments = random.Random(f"{victim} {step}")
    for _ in range(KILLS):
        for outcome in drill.kill(VICTIMS[victim], step, moments.randrange(1, 5)):
            assert outcome.get("error", {"code": "E05"})["code"] in LOST, outcome
            # Only ranks that all others have had from may take the push for a good one.
            assert "error" in outcome or step == "confirm", outcome
        drill.assert_goes_on()
