"""Where the ranks are, so that bytes are taken from the nearest that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FARTHEST = 3


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Args:
        host: Any name of its host, the same for all ranks there.
        device: What two ranks of that host have in common when bytes between them leave no device:
            a GPU's UUID, or the process; None for no such thing.
        rail: Which of the host's network devices it has, numbered alike on all hosts; None for any.
    """

    host: str
    device: str | None = None
    rail: int | None = None


@dataclass(frozen=True)
class Places:
    """Places of ranks; one that is missing is far from all.

    Args:
        sources: By the rank of the trainer.
        workers: By the rank of the worker.
    """

    sources: Mapping[int, Place] = field(default_factory=dict)
    workers: Mapping[int, Place] = field(default_factory=dict)

    def distances(self, ranks: int, workers: Sequence[int]) -> npt.NDArray[np.int8]:
        """(workers, ranks): 0 on one device, 1 on one host, 2 on one rail, else 3."""
        return np.array(
            [[self._distance(rank, worker) for rank in range(ranks)] for worker in workers],
            dtype=np.int8,
        ).reshape(len(workers), ranks)

    def _distance(self, rank: int, worker: int) -> int:
        one, other = self.sources.get(rank), self.workers.get(worker)
        if one is None or other is None:
            return FARTHEST
        if one.host == other.host:
            return 0 if one.device is not None and one.device == other.device else 1
        return 2 if one.rail is not None and one.rail == other.rail else FARTHEST
