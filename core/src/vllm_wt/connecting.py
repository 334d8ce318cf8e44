"""How all engines of a session come to know its trainer."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_wt.abreast import each
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.link import EngineLink
from vllm_wt.serving import reading, serving


def connect_each(
    trainer: TrainerWeightTransferEngine, links: Sequence[EngineLink], deadline: Deadline
) -> None:
    """Connect all engines, at the same time: each records its load plan, which takes seconds.

    Args:
        trainer: The trainer's side.
        links: The engines; none on a rank that does not lead.
        deadline: Of the whole.

    Raises:
        InvalidInfo: One of them was not started for this backend; nothing was asked of any.
        WeightTransferError: Of the first engine, in order, that could not be connected.
    """
    if not links:
        return
    each(links, EngineLink.require_backend)
    with serving(trainer) as part, part.blamed():
        with reading("connect", deadline):
            info = trainer.describe(deadline)
        each(links, lambda link: link.connect(info, deadline))
