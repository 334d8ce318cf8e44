"""What a session begins with: its source, the trainer's side, and engines that are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from vllm_wt.backends import trainer_engine
from vllm_wt.clients import as_clients, hosts_of
from vllm_wt.connecting import Claim, connect_each
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import InvalidInfo
from vllm_wt.following import connect_together, teamed
from vllm_wt.manifest import Manifest
from vllm_wt.members import Members, close_all
from vllm_wt.options import require_one_of
from vllm_wt.serving import reading
from vllm_wt.source import Announced, as_source
from vllm_wt.sources.snapshot import Place, Snapshot
from vllm_wt.together import TogetherTrainer


@dataclass(frozen=True)
class Opened:
    """A session's parts.

    Args:
        trainer: The trainer's side.
        manifest: What is sent.
        members: The engines; none on a rank that does not lead.
        announces: Whether tensors are handed over, rather than read from the source.
        snapshot: What is read instead of the source, if anything is.
    """

    trainer: TrainerWeightTransferEngine
    manifest: Manifest
    members: Members
    announces: bool
    snapshot: Snapshot | None


def opened(
    engines: Any,
    backend: str,
    source: Any,
    group: Any,
    snapshot: Any,
    deadline: Deadline,
    options: dict[str, Any],
    *,
    takes_over: bool,
) -> Opened:
    """Connect engines, with the arguments of `WeightSync.connect`; as of that what is raised.

    Args:
        takes_over: From a trainer that lives, too.
    """
    with teamed(group, deadline) as team:
        weights = as_source(source)
        announces = isinstance(weights, Announced)
        _require_snapshot(snapshot, announces)
        if team is not None:
            _require_values(announces)
            options = {**options, "team": team}
        leads = team is None or team.leads
        clients, owned = as_clients(engines) if leads else ([], [])
        try:
            with reading("connect", deadline):
                kept = None if snapshot == "none" else Snapshot(weights, snapshot)
                weights = kept or weights
                manifest = weights.manifest()
                trainer = trainer_engine(backend, weights, **options)
        except BaseException:
            close_all(owned)
            raise
        members = Members(trainer, clients, owned, Claim(takes_over))
        try:
            trainer.hosts = hosts_of(clients)
            if isinstance(trainer, TogetherTrainer):
                connect_together(trainer, members.links, deadline, members.claim)
            else:
                connect_each(trainer, members.links, deadline, members.claim)
        except BaseException:
            trainer.shutdown()
            members.close()
            raise
        return Opened(trainer, manifest, members, announces, kept)


def _require_snapshot(snapshot: Any, announces: bool) -> None:
    require_one_of("snapshot", snapshot, ("none", *get_args(Place)))
    if announces and snapshot != "none":
        raise InvalidInfo(
            "Weights that are handed over in chunks are not there to be copied first",
            where="snapshot",
            expected="a source with values, or no snapshot",
            got="an Announced",
            cure="leave snapshot out",
        )


def _require_values(announces: bool) -> None:
    if announces:
        raise InvalidInfo(
            "Weights that are handed over in chunks come from one rank",
            where="group",
            expected="a source with values, or no group",
            got="an Announced",
            cure="leave group out",
        )
