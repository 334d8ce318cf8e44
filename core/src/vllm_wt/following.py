"""What the ranks of a trainer do together: all connect, one leads a round, the others follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vllm_wt.connecting import Claim, connect_each
from vllm_wt.deadline import Deadline
from vllm_wt.delivery import Delivery
from vllm_wt.errors import WeightTransferError
from vllm_wt.link import EngineLink
from vllm_wt.serving import reading, serving
from vllm_wt.sources.gathering import gathers_within
from vllm_wt.team import Team
from vllm_wt.together import TogetherTrainer


@contextmanager
def teamed(group: Any, deadline: Deadline) -> Iterator[Team | None]:
    """The ranks of a group, if there is one; what fails on any of them until they have joined is
    raised on all.

    Raises:
        InvalidInfo: This process is not in the group.
        Timeout, TransportError: The ranks did not find each other.
    """
    if group is None:
        yield None
        return
    team = Team(group, deadline)
    try:
        yield team
    except WeightTransferError as error:
        if not team.has_agreed:
            team.agree({}, error, deadline, where="connect")
        raise
    except BaseException:
        team.close()
        raise


def connect_together(
    trainer: TogetherTrainer, links: Sequence[EngineLink], deadline: Deadline, claim: Claim
) -> None:
    """Connect engines to all ranks.

    Args:
        trainer: This rank's.
        links: The engines; the first rank has them.
        deadline: Of the whole.
        claim: How they are wanted.

    Raises:
        WeightTransferError: What failed on any rank.
    """
    trainer.join(deadline)
    error: WeightTransferError | None = None
    workers: int | None = None
    owners: list[str] | None = None
    with serving(trainer):
        try:
            connect_each(trainer, links, deadline, claim)
            known = [link.workers for link in links if link.workers is not None]
            workers = sum(known) if len(known) == len(links) else None
            owners = _owners(links, deadline)
        except WeightTransferError as caught:
            error = caught
        trainer.share(owners, workers, error)


def _owners(links: Sequence[EngineLink], deadline: Deadline) -> list[str] | None:
    """Whom each worker of all engines reads; None where they do not tell."""
    with suppress(WeightTransferError):
        reports = [report for link in links for report in link.reports(deadline)]
        return [str(report.facts.get("owner")) for report in reports]
    return None


class Leading(Delivery):
    """A round that the first rank leads: the others are told what has failed."""

    _goes_ahead = False

    _trainer: TogetherTrainer

    def give_up(self, error: BaseException) -> BaseException:
        if not self._over:
            self._trainer.fail(error)
        return self._trainer.behind(super().give_up(error))


def follow(trainer: TogetherTrainer, version: int, deadline: Deadline) -> None:
    """This rank's part in a round that the first one leads.

    Raises:
        WeightTransferError: What failed here, or on another rank.
    """
    with serving(trainer) as part, gathers_within(deadline):
        trainer.publish(version, deadline)

        def watch() -> None:
            part.check()
            trainer.watch()

        try:
            with part.blamed(), reading("send", trainer.until):
                trainer.send(trainer.workers, trainer.until, watch)
        except BaseException as error:
            trainer.fail(error)
            trainer.settle()
            cause = trainer.behind(error)
            if cause is not error:
                raise cause from error
            raise
        trainer.settle()
