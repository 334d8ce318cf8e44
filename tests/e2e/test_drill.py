"""A trainer is killed at random moments of its rounds: the engine is whole, or says that it is torn.

``make test-all ARGS=tests/e2e/test_drill.py``; VLLM_WT_DRILL_SEED draws other moments, and
VLLM_WT_DRILL_KILLS another number of them.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from trainers import Trainer, in_background

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.errors import PeerDead
from vllm_wt.testing.engines import greedy_tokens, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    reference_tokens,
    save_checkpoint,
)
from vllm_wt.testing.throttled import RATE

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = int(os.environ.get("VLLM_WT_DRILL_KILLS", "50"))
SEED = int(os.environ.get("VLLM_WT_DRILL_SEED", "20"))
WEIGHTS = (0, 1, 2, 3)
STAGINGS = ("device", "none")
SLOW_MB_S = "4"
"""At which a round takes about half a second."""
LATEST = 1.2
"""Of the length of a round: the last moment at which a trainer is killed."""
NEW_TOKENS = 8
SCRIPT = Path(__file__).parent.parent / "support" / "wt_drill_trainer.py"
KINDS = {
    ("device", "before"),
    ("device", "after"),
    ("none", "before"),
    ("none", "torn"),
    ("none", "after"),
}
"""How a round of each staging can have ended for the engine; each is to be met."""


class PausedLlm(LocalClient):
    """An `LLM` as its owner would let trainers pause it: by not calling it."""

    paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def is_paused(self) -> bool:
        return self.paused


class DrillEngine:
    """An `LLM` on a slow wire, and the process that forks its trainers."""

    def __init__(self, folder: Path, tp: int) -> None:
        self.folder, self.tp = folder, tp
        self.shape = ModelShape(vocab=500, tied=tp == 2)
        self._prompts = prompts(self.shape, count=2)
        for seed in WEIGHTS:
            save_checkpoint(random_model(self.shape, seed), folder / f"seed{seed}")
        self.reference = {
            seed: reference_tokens(folder / f"seed{seed}", self._prompts, NEW_TOKENS)
            for seed in WEIGHTS
        }
        self.llm = start_llm(
            folder / "seed0",
            self.shape.dtype,
            "rdma",
            tp=tp,
            worker_extension_cls="wt_drill.DrillExtension",
        )
        self.client = PausedLlm(self.llm)
        self.trainers: list[DrillTrainer] = []
        self._lock = threading.Lock()  # an LLM takes one call at a time
        methods = {
            name: self._locked(method) for name, method in engine_methods(self.client).items()
        }
        self._server = RelayServer(folder / "engine.sock", methods)
        self._forker = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _locked(self, method):
        def call(*args):
            with self._lock:
                return method(*args)

        return call

    def fork(self, name: str) -> int:
        arguments = (str(self.folder), name, asdict(self.shape))
        print(json.dumps(arguments), file=self._forker.stdin, flush=True)
        return int(self._forker.stdout.readline())

    def rpc(self, method: str):
        with self._lock:
            return self.llm.collective_rpc(method)

    def tokens(self):
        assert not self.client.paused
        with self._lock:
            return greedy_tokens(self.llm, self._prompts, NEW_TOKENS)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self._server.close()
        self._forker.communicate()
        self.llm.llm_engine.engine_core.shutdown()


class DrillTrainer(Trainer):
    """A trainer that is connected, in a process of its own."""

    def __init__(self, engine: DrillEngine, staging: str) -> None:
        name = f"trainer-{uuid.uuid4().hex[:8]}.sock"
        self.staging = staging
        self._versions = itertools.count(1)
        engine.trainers.append(self)
        self.pid = engine.fork(name)
        self._path = engine.folder / name
        self._client = None
        self.wait_ready()
        self.call("connect", staging)

    def push(self, seed: int) -> None:
        self.call("push", next(self._versions), seed)


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(request.param))))
    monkeypatch.setenv(RATE, SLOW_MB_S)
    with closing(DrillEngine(tmp_path, request.param)) as engine:
        yield engine


class Drill:
    """What the weights can be, how long rounds take, and what came of the kills."""

    def __init__(self, engine: DrillEngine) -> None:
        self.engine = engine
        self.random = random.Random(SEED + engine.tp)
        self.digests = {}
        self.seconds = {}
        self.outcomes = collections.Counter()
        for staging in STAGINGS:
            self.learn(staging)
        self.held = WEIGHTS[-1]

    def learn(self, staging: str) -> None:
        """Clean rounds: each is right by what is generated, and the bits do not depend on the way."""
        trainer = DrillTrainer(self.engine, staging)
        seconds = []
        for seed in WEIGHTS:
            began = time.monotonic()
            trainer.push(seed)
            seconds.append(time.monotonic() - began)
            assert self.engine.tokens() == self.engine.reference[seed]
            found = self.engine.rpc("wt_digests")
            assert self.digests.setdefault(seed, found) == found
        self.seconds[staging] = sorted(seconds)[len(seconds) // 2]
        batches = {each["batches"] for each in self.engine.rpc("wt_drill")}
        assert min(batches) >= 4 if staging == "none" else batches == {1}
        assert all(each["passes"] >= 8 for each in self.engine.rpc("wt_drill"))
        trainer.close()

    def moments(self) -> list[tuple[str, float]]:
        """Staging and moment, as a part of a round, of all kills: evenly spread, in any order."""
        each = KILLS // len(STAGINGS)
        found = [
            (staging, LATEST * (place + self.random.random()) / each)
            for staging in STAGINGS
            for place in range(each)
        ]
        self.random.shuffle(found)
        return found

    def kill(self, trainer: DrillTrainer, moment: float) -> int:
        """The weights that it was about to push."""
        wanted = self.random.choice([seed for seed in WEIGHTS if seed != self.held])
        pushing = in_background(lambda: trainer.push(wanted))
        threading.Event().wait(moment * self.seconds[trainer.staging])
        trainer.kill()
        if not isinstance(pushing.exception(60), PeerDead | None):
            pushing.result()
        trainer.close()
        return wanted

    def judge(self, staging: str, wanted: int, successor: DrillTrainer) -> str:
        """What the engine holds since a kill, and whether a new trainer learns of it."""
        torn = successor.call("torn")
        assert any(state["torn"] for state in self.engine.rpc("wt_state")) is torn
        found = self.engine.rpc("wt_digests")
        if torn:
            assert staging == "none", "nothing is loaded before everything has come"
            assert self.engine.client.paused, "it would generate"
            return "torn"
        assert found in (self.digests[self.held], self.digests[wanted]), "torn, and nobody says so"
        after = found == self.digests[wanted]
        if after:
            self.held = wanted
        self.engine.client.resume()  # a pause that a trainer has died in is for its owner to end
        assert self.engine.tokens() == self.engine.reference[self.held]
        return "after" if after else "before"

    def heal(self, trainer: DrillTrainer) -> None:
        self.held = self.random.choice(WEIGHTS)
        trainer.push(self.held)
        assert not self.engine.client.paused
        assert not trainer.call("torn")
        assert not any(state["torn"] for state in self.engine.rpc("wt_state"))
        assert self.engine.rpc("wt_digests") == self.digests[self.held]

    def run(self) -> None:
        moments = self.moments()
        trainer = DrillTrainer(self.engine, moments[0][0])
        for number, (staging, moment) in enumerate(moments):
            said = f"seed {SEED}, kill {number}: staging {staging} at {moment:.3f} of a round"
            following = moments[number + 1][0] if number + 1 < len(moments) else STAGINGS[0]
            try:
                # Whatever came of the kills before, so that a seed gives the same moments and weights.
                self.random.seed(f"{SEED} {self.engine.tp} {number}")
                heals = self.random.random() < 0.5
                wanted = self.kill(trainer, moment)
                trainer = DrillTrainer(self.engine, following)
                outcome = self.judge(staging, wanted, trainer)
                self.outcomes[staging, outcome] += 1
                if heals or outcome == "torn":  # else its first round is the one it is killed in
                    self.heal(trainer)
            except BaseException:
                print(said)
                raise
        self.heal(trainer)
        assert self.engine.tokens() == self.engine.reference[self.held]


def test_drill(engine):
    drill = Drill(engine)
    drill.run()
    counts = ", ".join(f"{s} {o} {n}" for (s, o), n in sorted(drill.outcomes.items()))
    lengths = ", ".join(f"{s} {t:.2f} s" for s, t in drill.seconds.items())
    print(f"seed {SEED}, TP {engine.tp}, {KILLS} kills: {counts}; rounds: {lengths}")
    assert set(drill.outcomes) == KINDS
