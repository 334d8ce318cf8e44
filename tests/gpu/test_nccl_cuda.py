"""A trainer broadcasts to a real engine by NCCL: both on one GPU, each as if on a host of its own.

The oracles: transformers in float32; in any dtype a fresh engine of the same setting that loads the
same checkpoint, by its tokens and by digests of all its tensors.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from native_calls import Native
from native_trainers import NativeTrainer
from processes import LOST, Forker, Group, until
from trainers import Trainer, in_background, wait_for

from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, WrongOrder
from vllm_wt.testing.models import random_model, randomize, reference_tokens, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKEND = "nccl"
ENVIRONMENT = {"NCCL_HOSTID": "engine", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
BUCKETS = {"bucket_nbytes": 64 << 10}
"""Small ones, so that there are several."""
HELD = 2
"""The bucket that a trainer which is to die has not sent."""
MIB = 1 << 20


@pytest.fixture
def one_engine(engine: Any) -> Any:
    """For what the dtype and the graphs have no part in."""
    if str(engine.setting) != "float32-eager":
        pytest.skip("once is enough")
    return engine


def trainer_of(engine: Any, host: str = "trainer") -> Trainer:
    """A new process on a host of this name, as NCCL sees it."""
    trainer = engine.trainer()
    trainer.call("set_environment", "NCCL_HOSTID", host)
    return trainer


def connect(trainer: Trainer, *, idle: bool = False, **options: Any) -> None:
    trainer.call("connect", 60.0, None, BUCKETS | options, idle, "nccl")


def assert_holds(engine: Any, version: int, checkpoint: str) -> None:
    if engine.setting.dtype == "float32":
        tokens = engine.tokens()
        assert tokens == reference_tokens(Path(checkpoint), engine.prompts, len(tokens[0]))
    state = engine.rpc("wt_state")
    assert (state["state"], state["version"], state["torn"]) == ("idle", version, False)
    assert state["meta"] == []


def assert_a_new_trainer_syncs(engine: Any, seed: int) -> None:
    trainer = trainer_of(engine)
    connect(trainer)
    checkpoint = trainer.call("randomize", seed)
    trainer.call("push", 1)
    assert_holds(engine, 1, checkpoint)


def test_three_rounds_then_the_same_as_a_fresh_engine(
    engine: Any, fresh: Callable[[str], Any]
) -> None:
    addresses = engine.rpc("wt_addresses")
    trainer = trainer_of(engine)
    connect(trainer)
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", version)
        print(engine.setting, trainer.call("push", version))
        seen.append(engine.tokens())
        assert seen[-1] not in seen[:-1]
        assert_holds(engine, version, checkpoint)
    assert engine.rpc("wt_addresses") == addresses, "captured graphs would read the old ones"
    other = fresh(checkpoint)
    assert other.tokens() == seen[-1]
    assert other.rpc("wt_digests") == engine.rpc("wt_digests")


@pytest.mark.parametrize("verify", ["digest", "bytes"])
@pytest.mark.parametrize("staging", ["device", "none"])
@pytest.mark.parametrize("bucket_nbytes", [64 << 10, 256 << 20], ids=["small", "one"])
def test_each_way_to_stage_and_to_verify_loads_the_same(
    one_engine: Any, staging: str, verify: str, bucket_nbytes: int
) -> None:
    trainer = trainer_of(one_engine)
    options = {"staging": staging, "verify": verify, "bucket_nbytes": bucket_nbytes}
    connect(trainer, idle=staging == "none", **options)
    for version in (1, 2):
        checkpoint = trainer.call("randomize", 10 + version)
        trainer.call("push", version)
        assert_holds(one_engine, version, checkpoint)


@pytest.mark.parametrize("dead", [True, False], ids=["killed", "stopped"])
def test_a_trainer_gone_in_mid_broadcast_leaves_the_old_weights(
    engine: Any, tmp_path: Path, dead: bool
) -> None:
    trainer = trainer_of(engine)
    connect(trainer)
    trainer.call("randomize", 20)
    trainer.call("push", 1)
    old, digests = engine.tokens(), engine.rpc("wt_digests")
    trainer.call("hold", HELD, str(tmp_path / "held"))
    trainer.call("randomize", 21)
    pushing = in_background(lambda: trainer.call("push", 2, 60.0 if dead else 4.0))
    wait_for(
        lambda: (tmp_path / "held").exists() and engine.rpc("wt_state")["state"] == "receiving"
    )
    if dead:
        trainer.kill()
        with pytest.raises(PeerDead):
            pushing.result(30)
    else:
        trainer.stop()
    wait_for(lambda: not engine.rpc("wt_receive")["running"])
    assert engine.rpc("wt_receive")["error"] in (["PeerDead"] if dead else ["Timeout", "PeerDead"])
    assert (engine.tokens(), engine.rpc("wt_digests")) == (old, digests)
    trainer.kill()
    assert_a_new_trainer_syncs(engine, 22)


def test_B48_a_trainer_on_the_gpu_of_the_engine_is_refused(one_engine: Any) -> None:
    old = one_engine.tokens()
    trainer = trainer_of(one_engine, host="engine")
    connect(trainer)
    trainer.call("randomize", 30)
    with pytest.raises(InvalidInfo, match="on one GPU"):
        trainer.call("push", 1)
    assert one_engine.tokens() == old
    assert_a_new_trainer_syncs(one_engine, 31)


def test_thirty_rounds_take_no_more_memory_than_three(one_engine: Any) -> None:
    trainer = trainer_of(one_engine)
    connect(trainer)
    free = []
    for version in range(1, 31):
        trainer.call("randomize", 50, False)
        trainer.call("push", version)
        if version in (3, 30):
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 8 * MIB


# -- in vLLM's own form ----------------------------------------------------------------------------

SMALL = {"packed_buffer_size_bytes": 64 << 10}
"""Several parcels."""


@pytest.fixture
def native(engine: Any, tmp_path: Path) -> Iterator[Native]:
    trainers: list[NativeTrainer] = []
    made = Native(engine, tmp_path, trainers, "cuda")
    yield made
    made.close()
    for trainer in trainers:
        trainer.close()


def assert_loaded(engine: Any, fresh: Callable[[str], Any], checkpoint: str) -> None:
    """It generates, and holds, what another engine does that has loaded the checkpoint."""
    other = fresh(checkpoint)
    assert engine.tokens() == other.tokens()
    assert engine.rpc("wt_digests") == other.rpc("wt_digests")
    other.close()


def test_the_articles_calls(native: Native, fresh: Callable[[str], Any]) -> None:
    native.connect()
    seen = [native.engine.tokens()]
    ways: tuple[dict[str, Any], ...] = ({"packed": True}, {"packed": True} | SMALL)
    for seed, how in enumerate((*ways, {"packed": False}), 110):
        checkpoint = native.trainer.call("randomize", seed)
        native.push(**how)
        seen.append(native.engine.tokens())
        assert seen[-1] not in seen[:-1]
    assert_loaded(native.engine, fresh, checkpoint)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_native_trainer_gone_in_mid_round(native: Native, tmp_path: Path, end: str) -> None:
    engine = native.engine
    native.connect()
    old, digests = engine.tokens(), engine.rpc("wt_digests")
    flag = tmp_path / "held"
    native.trainer.call("randomize", 120)
    native.trainer.call("hold", 1, str(flag))
    native.begin_send(packed=True, **SMALL)
    engine.call("start_weight_update")
    updating = in_background(lambda: native.update(packed=True, deadline_s=5.0, **SMALL))
    wait_for(flag.exists)
    native.lose_trainer(end)
    with pytest.raises(PeerDead if end == "kill" else Timeout):
        updating.result(60)
    with pytest.raises(WrongOrder):
        engine.call("finish_weight_update")
    assert (engine.tokens(), engine.rpc("wt_digests")) == (old, digests)
    assert_a_new_trainer_syncs(engine, 121)


# -- several ranks that send -----------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "support" / "wt_senders.py"


class Ranks(Group):
    """Of a trainer with FSDP2, whose weights are the engine's."""

    def __init__(self, forker: Forker, engine: Any) -> None:
        super().__init__(forker, BACKEND, 2, engine, "cuda")
        self.all("wait_less", 2.0)
        self.all("make_model", "fsdp2", asdict(engine.shape))
        options = BUCKETS | {"senders": "all"}
        path = str(engine.folder / "engine.sock")
        self.all("connect_together", path, BACKEND, options, 60.0)

    def checkpoint(self, folder: Path, seed: int) -> str:
        """New weights, and what they are."""
        self.all("fill", seed)
        model = random_model(self.engine.shape, seed=0)
        randomize(model, seed)
        save_checkpoint(model, folder / f"full{seed}")
        return str(folder / f"full{seed}")


@pytest.fixture
def ranks(engine: Any, tmp_path: Path) -> Iterator[Callable[[], Ranks]]:
    """Makes trainers of the engine."""
    forker = Forker(tmp_path, SCRIPT)
    yield lambda: Ranks(forker, engine)
    forker.close()


def test_two_ranks_that_send(
    engine: Any, fresh: Callable[[str], Any], ranks: Callable[[], Ranks], tmp_path: Path
) -> None:
    group = ranks()
    assert [each["nbytes"] > 0 for each in group.all("facts")] == [True, True]
    group.all("gathers")
    for version in (1, 2, 3):
        checkpoint = group.checkpoint(tmp_path, 130 + version)
        group.push(version)
    assert group.all("gathers") == [0, 0]
    assert_loaded(engine, fresh, checkpoint)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_mid_push(
    engine: Any, ranks: Callable[[], Ranks], tmp_path: Path, victim: int
) -> None:
    group = ranks()
    old, digests = engine.tokens(), engine.rpc("wt_digests")
    group.all("fill", 140)
    dying, other = group.ranks[victim], group.ranks[1 - victim]
    flag = tmp_path / "held-back"
    dying.call("hold", 1, str(flag))
    group.start("push_together", 1, 8.0)
    until(flag.exists, "the bucket that is held")
    dying.signal(signal.SIGKILL)
    until(dying.dead, "a rank to die")
    assert set(group.codes([other])) <= LOST
    assert (engine.tokens(), engine.rpc("wt_digests")) == (old, digests)
    other.close()
    assert_a_new_trainer_syncs(engine, 141)
