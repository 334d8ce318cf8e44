"""Three hundred rounds, a random fault in every third: `make soak`, VLLM_WT_SOAK_SEED to replay."""

from __future__ import annotations

import os
import random

import pytest
from trainers import in_background, wait_for
from wt_faults import resources

from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    InvalidInfo,
    Superseded,
    TornModel,
    TransportError,
    WrongOrder,
    from_text,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

ROUNDS = int(os.environ.get("VLLM_WT_SOAK_ROUNDS", "300"))
SEED = int(os.environ.get("VLLM_WT_SOAK_SEED", "20"))
SETTLED = ROUNDS // 5
SLACK = 48 << 20
"""Bytes that allocators and message queues may keep; one leaked agent a fault would be more."""
PHASES = {"open": TransportError, "receive": TransportError, "seal": CorruptTransfer}


class Soak:
    """One engine, one trainer that lives throughout, and a second one for what kills trainers."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.random = random.Random(SEED + engine.tp)
        self.trainer = engine.trainer()
        self.seeds = iter(range(1000, 10_000))
        self.version = 0
        self.trainer.call("connect")

    def good_round(self) -> None:
        checkpoint = self.trainer.call("randomize", next(self.seeds))
        self.version += 1
        self.trainer.call("push", self.version)
        assert self.engine.tokens() == self.engine.reference(checkpoint)
        assert not any(state["torn"] for state in self.engine.state())

    def faulty_round(self) -> str:
        fault = self.random.choice(FAULTS)
        before = self.engine.checksums()
        if not fault(self):
            assert self.engine.checksums() == before
        self.engine.assert_in_step()
        assert not any(state["meta"] for state in self.engine.state())
        return fault.__name__

    def refused(self, error_cls) -> None:
        self.version += 1
        with pytest.raises(error_cls):
            self.trainer.call("push", self.version)

    def reconnect(self) -> None:
        self.trainer.call("connect")
        self.version = 0

    def resources(self) -> list[dict[str, int]]:
        """Of every worker, of the trainer, and of this process."""
        return [*self.engine.rpc("wt_resources"), self.trainer.call("resources"), resources()]


# -- faults: True where the weights may change --------------------------------------------------


def a_phase_fails_on_one_rank(soak) -> bool:
    phase = soak.random.choice(list(PHASES))
    soak.engine.fail_once(phase, soak.random.randrange(soak.engine.tp))
    soak.refused(PHASES[phase])
    return False


def the_commit_fails(soak) -> bool:
    soak.engine.fail_once("apply", soak.random.randrange(soak.engine.tp))
    soak.refused(TornModel)
    assert soak.trainer.call("torn")
    return True


def the_call_gets_lost(soak) -> bool:
    def lose():
        raise ConnectionError("this call never reached the engine")

    method = soak.random.choice(["start_weight_update", "update_weights", "finish_weight_update"])
    soak.engine.before[method] = lose
    soak.refused(EngineError)
    return False


def a_trainer_is_killed_in_the_middle(soak) -> bool:
    _hold_a_second_trainer(soak).kill()
    soak.engine.rpc("wt_let_go")
    soak.reconnect()
    return False


def a_trainer_is_stopped_replaced_and_goes_on(soak) -> bool:
    other = _hold_a_second_trainer(soak)
    other.stop()
    soak.reconnect()
    other.go_on()
    with pytest.raises(Superseded):
        other.pushing.result(60)
    other.close()
    return False


def another_trainer_takes_over(soak) -> bool:
    other = soak.engine.trainer()
    other.call("randomize", next(soak.seeds), False)
    other.call("reconnect")
    other.call("push", 1)
    soak.refused(Superseded)
    other.close()
    soak.reconnect()
    return True


def the_version_goes_back(soak) -> bool:
    if soak.version:
        with pytest.raises(InvalidInfo):
            soak.trainer.call("push", 0)
    return False


def somebody_calls_out_of_order(soak) -> bool:
    call = soak.random.choice(["finish_weight_update", "start_weight_update"])
    llm = soak.engine.llm
    if call == "start_weight_update":
        llm.start_weight_update()
    with pytest.raises(Exception, match="WT-E") as raised:
        getattr(llm, call)()
    assert type(from_text(str(raised.value), where=call)) is WrongOrder
    return False


def somebody_sends_garbage(soak) -> bool:
    garbage = soak.random.choice([{}, {"session": 3}, {"op": "open", "ticket": -1}, {"x": [None]}])
    call, field = soak.random.choice(
        [("init_weight_transfer_engine", "init_info"), ("update_weights", "update_info")]
    )
    with pytest.raises(Exception, match="WT-E") as raised:
        getattr(soak.engine.llm, call)({field: garbage})
    assert type(from_text(str(raised.value), where=call)) is InvalidInfo
    return False


FAULTS = [
    a_phase_fails_on_one_rank,
    the_commit_fails,
    the_call_gets_lost,
    a_trainer_is_killed_in_the_middle,
    a_trainer_is_stopped_replaced_and_goes_on,
    another_trainer_takes_over,
    the_version_goes_back,
    somebody_calls_out_of_order,
    somebody_sends_garbage,
]


def _hold_a_second_trainer(soak):
    """A second trainer whose workers are in the middle of reading from it."""
    other = soak.engine.trainer()
    other.call("reconnect")
    soak.engine.rpc("wt_hold_read")
    other.pushing = in_background(lambda: other.call("push", 1))
    wait_for(lambda: all(state["state"] == "receiving" for state in soak.engine.state()))
    return other


def test_soak(engine):
    soak = Soak(engine)
    history = []
    for round_ in range(1, ROUNDS + 1):
        try:
            history.append(soak.faulty_round() if round_ % 3 == 0 else soak.good_round())
        except BaseException:
            print(f"seed {SEED}, round {round_}, history {history[-6:]}")
            raise
        if round_ == SETTLED:
            settled = soak.resources()
    soak.good_round()
    for before, after in zip(settled, soak.resources(), strict=True):
        assert after["rss"] < before["rss"] + SLACK
        assert after["threads"] <= before["threads"] + 1
        assert after["fds"] <= before["fds"] + 4
    assert {name for name in history if name} == {fault.__name__ for fault in FAULTS}
