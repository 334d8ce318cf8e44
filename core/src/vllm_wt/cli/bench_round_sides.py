"""Both sides of ``vllm-wt bench round``: rounds of each way to send the weights, and what they left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_wt.cli.bench_round_builtin import BuiltinIpc
from vllm_wt.cli.bench_round_engine import RoundEngine, Seen
from vllm_wt.cli.bench_round_model import TrainerWeights
from vllm_wt.cli.bench_round_timing import Made, Rounds, timed_rounds
from vllm_wt.results import PushResult
from vllm_wt.session import WeightSync

_WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """Options of a session of ours."""

    verify: str
    staging: str

    def __str__(self) -> str:
        return f"{self.verify}:{self.staging}"


@dataclass(frozen=True)
class Side:
    """One way to send the weights, measured.

    Args:
        seconds: Of whole rounds, between which the weights were looked at.
        hot: Of rounds right after each other.
        seen: What the engine did and held after the last, by which it has the trainer's content 0.
        memory: Of the worker before and after; see `bench_round_worker.RoundWorker.wt_memory`.
        pushes: What our rounds say of themselves.
        copy_s: Of the copies of our commit alone.
    """

    seconds: list[float]
    hot: list[float]
    seen: Seen
    memory: tuple[dict[str, int], dict[str, int]] | None
    pushes: list[PushResult] = field(default_factory=list)
    copy_s: float | None = None


def builtin_sides(
    engine: RoundEngine, weights: TrainerWeights, rounds: int, device: torch.device
) -> dict[str, Side]:
    """vLLM's own, in its two modes."""
    before = engine.rpc("wt_memory")
    sides = {}
    for mode in ("unpacked", "packed"):
        builtin = BuiltinIpc(engine.llm, weights.state, packed=mode == "packed")
        engine.rpc("wt_memory", True)
        done = _rounds(builtin.round, engine, weights, rounds, device)
        memory = _memory(engine, before)  # requests need some too: first
        sides[mode] = Side(done.seconds, done.hot, engine.look(), memory)
    return sides


def our_sides(
    engine: RoundEngine,
    weights: TrainerWeights,
    backend: str,
    settings: list[Setting],
    rounds: int,
    device: torch.device,
) -> dict[Setting, Side]:
    """Ours, a session for each setting."""
    before = engine.rpc("wt_memory")
    sides = {}
    for setting in settings:
        engine.rpc("wt_memory", True)
        with WeightSync.connect(
            engine.llm,
            backend=backend,
            source=weights.state,
            verify=setting.verify,
            staging=setting.staging,
        ) as sync:
            done = _rounds(sync.push, engine, weights, rounds, device)
            memory = _memory(engine, before)
            seen = engine.look()
            copy_s = engine.rpc("wt_copy_seconds", rounds)  # may spoil the model: last
        sides[setting] = Side(done.seconds, done.hot, seen, memory, done.made, copy_s)
    return sides


def _rounds(
    send: Callable[[int], Made],
    engine: RoundEngine,
    weights: TrainerWeights,
    rounds: int,
    device: torch.device,
) -> Rounds[Made]:
    """The last one sends content 0, whatever the number of rounds."""
    return timed_rounds(
        send,
        prepare=weights.become,
        check=lambda: engine.require_watched(weights),
        warm_up=_WARM_UP,
        rounds=rounds,
        device=device,
    )


def _memory(
    engine: RoundEngine, before: dict[str, int] | None
) -> tuple[dict[str, int], dict[str, int]] | None:
    return None if before is None else (before, engine.rpc("wt_memory"))
