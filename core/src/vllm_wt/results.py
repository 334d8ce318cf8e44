"""What a session tells of its pushes and engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_wt.errors import WeightTransferError
from vllm_wt.link import Stages
from vllm_wt.reports import WorkerReport


@dataclass(frozen=True)
class PushResult:
    """What one push did.

    Args:
        version: Version that the engines have now.
        nbytes: Payload bytes of a full update.
        tensors: Number of tensors.
        gather_s: Seconds until what is there in full was readable.
        total_s: Seconds of the whole push.
        engines: Stage times of those that have it, by engine name; of a group of ranks, the first one
            has them.
        failed: Why engines were left out, by engine name; always empty unless
            ``on_failure="exclude"``.
    """

    version: int
    nbytes: int
    tensors: int
    gather_s: float
    total_s: float
    engines: dict[str, Stages]
    failed: dict[str, WeightTransferError] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """Payload bytes over the seconds of the whole push, in 10^9 bytes a second; what several
        engines have each received counts once."""
        return self.nbytes / self.total_s / 1e9 if self.total_s else 0.0

    @property
    def stop_s(self) -> float:
        """Seconds that the slowest engine took to pause."""
        return max((stages.stop for stages in self.engines.values()), default=0.0)

    @property
    def commit_s(self) -> float:
        """Seconds of the longest commit."""
        return max((stages.load for stages in self.engines.values()), default=0.0)

    @property
    def resume_s(self) -> float:
        """Seconds that the slowest engine took to go on."""
        return max((stages.resume for stages in self.engines.values()), default=0.0)


@dataclass(frozen=True)
class EngineStatus:
    """What one engine says of itself.

    Args:
        name: As in errors and in :attr:`PushResult.engines`.
        version: What it has committed last in this session, None for nothing or not known.
        torn: It mixes weights of two versions and must not generate before a full push.
        error: Why it could not be asked; the rest is what was known before.
        paused: It is paused. One that a push has left so, since it is torn, or could not be asked, or
            did not resume, goes on after the next push that succeeds; one that somebody else has
            paused is theirs to resume.
        workers: What each of its workers says of itself, by rank: its version, where it receives and
            why, how much memory that takes. Empty where that is not told.
    """

    name: str
    version: int | None
    torn: bool
    error: str | None = None
    paused: bool = False
    workers: tuple[WorkerReport, ...] = ()
