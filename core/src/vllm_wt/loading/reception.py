"""What a worker receives, where, and what of it is handed over at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_wt.digests import BLOCK
from vllm_wt.info import Staging
from vllm_wt.loading.arena import Arena, Choice
from vllm_wt.loading.batches import batches
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.slices import Slices
from vllm_wt.loading.staging import Intake
from vllm_wt.packing import Layout

STREAMED_NBYTES: Final = 256 << 20
"""About what is received at a time where an update is loaded while it arrives."""


@dataclass(frozen=True)
class Reception:
    """How the slices of a worker come.

    Args:
        slices: What it needs.
        choice: Where that is received, and why.
        parts: Names of the tensors that are in memory at the same time, in order.
        intake: What the engine says of it to core.
    """

    slices: Slices
    choice: Choice
    parts: Sequence[Sequence[str]]
    intake: Intake

    @classmethod
    def planned(
        cls, plan: LoadPlan, slices: Slices, arena: Arena, asked: Staging, *, host: bool
    ) -> Reception:
        """By the memory that there is.

        Args:
            plan: Of the full tensors.
            slices: Narrowed from it.
            arena: Of the worker.
            asked: What the trainer wants.
            host: Whether host memory can be received into.

        Raises:
            InvalidInfo: It is asked for, and cannot.
        """
        needed = Layout(slices.plan.manifest, alignment=BLOCK).nbytes
        choice = arena.choose(asked, needed, host=host)
        names = tuple(tensor.name for tensor in slices.plan.manifest.tensors)
        if choice.staging != "none":
            return cls(slices, choice, (names,), Intake(slices.plan))
        # Cut by the sizes of full tensors, so that all ranks cut alike.
        wanted = frozenset(names)
        cut = ([n for n in part if n in wanted] for part in batches(plan, STREAMED_NBYTES))
        parts = tuple(tuple(part) for part in cut if part)
        return cls(slices, choice, parts, Intake(slices.plan, parts))
