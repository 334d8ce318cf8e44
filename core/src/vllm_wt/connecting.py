"""How all engines of a session come to know its trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_wt.abreast import each
from vllm_wt.beacon import Beacon
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.info import InitInfo
from vllm_wt.link import EngineLink
from vllm_wt.serving import reading, serving


@dataclass(frozen=True)
class Claim:
    """How a session wants its engines.

    Args:
        takes_over: From a trainer that lives, too.
        beacon: Answers as long as this trainer does.
    """

    takes_over: bool = False
    beacon: Beacon = field(default_factory=Beacon)

    def made(self, info: InitInfo, link: EngineLink) -> InitInfo:
        """What one of the engines is told."""
        host = getattr(link.client, "host", None)
        trainer = self.beacon.towards(info.session, host if isinstance(host, str) else None)
        return replace(info, engine=link.name, trainer=trainer, takes_over=self.takes_over)


def connect_each(
    trainer: TrainerWeightTransferEngine,
    links: Sequence[EngineLink],
    deadline: Deadline,
    claim: Claim,
) -> None:
    """Connect all engines, at the same time: each records its load plan, which takes seconds.

    Args:
        trainer: The trainer's side.
        links: The engines; none on a rank that does not lead.
        deadline: Of the whole.
        claim: How they are wanted.

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
        each(links, lambda link: link.connect(claim.made(info, link), deadline))
