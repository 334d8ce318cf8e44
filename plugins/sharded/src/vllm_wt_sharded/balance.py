"""How much each owner gives of what several have, so that the busiest of them gives the least.

Groups of bytes with the same owners are poured over these owners like water, one group after the
other, each as level as the rest allows, again and again. That lowers the sum of the squares of the
loads until no group can lower it further, and loads with the least sum of squares have the least
maximum too. How near it has come is told by a bound that holds for every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_wt_sharded.patterns import Ints

Floats = npt.NDArray[np.float64]
_NEAR = 1.002
"""Pouring ends when the busiest rank gives no more than this times the bound."""
_VISITS = 1_500_000
"""The most owners that are visited in one pouring: a second or two."""


@dataclass(frozen=True)
class Group:
    """Bytes that the same ranks have.

    Args:
        owners: The ranks, ascending.
        nbytes: How many of them are needed, by all workers together.
        far: How far each owner is from these workers, as `Places.distances` has it.
    """

    owners: tuple[int, ...]
    nbytes: int
    far: tuple[int, ...]


@dataclass
class Shares:
    """Who gives how much.

    Args:
        groups: What is shared out.
        base: (ranks,), bytes that each rank gives besides.
        given: For each group the bytes of each of its owners.
        bound: Bytes that the busiest rank gives at least, in any plan.
    """

    groups: Sequence[Group]
    base: Ints
    given: list[list[float]]
    bound: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.loads: list[float] = self.base.astype(np.float64).tolist()
        self._owners = np.array([r for g in self.groups for r in g.owners], dtype=np.int64)
        counts = [len(group.owners) for group in self.groups]
        self._first = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self._nbytes = np.array([group.nbytes for group in self.groups], dtype=np.float64)

    @property
    def busiest(self) -> float:
        return max(self.loads, default=0.0)

    def pour(self, penalty: float) -> None:
        """Pour until the loads are as level as they can be, or for as long as is worth it.

        Args:
            penalty: Bytes that an owner must have less than one that is nearer by one, to give as much.
        """
        sweeps = max(2, _VISITS // max(1, len(self._owners)))
        for _ in range(sweeps):
            before = self.busiest, sum(load * load for load in self.loads)
            for i in range(len(self.groups)):
                self._pour_one(i, penalty)
            self.bound = max(self.bound, self._cut())
            after = self.busiest, sum(load * load for load in self.loads)
            if penalty == 0 and self.busiest <= self.bound * _NEAR:
                return
            if abs(before[1] - after[1]) <= 1e-9 * after[1] and before[0] <= after[0] * 1.00001:
                return

    def _pour_one(self, i: int, penalty: float) -> None:
        group, given, loads = self.groups[i], self.given[i], self.loads
        levels = []
        for k, rank in enumerate(group.owners):
            loads[rank] -= given[k]
            levels.append((loads[rank] + penalty * group.far[k], k))
            given[k] = 0.0
        levels.sort()
        below, level = 0.0, 0.0
        for count, (height, _) in enumerate(levels, 1):
            below += height
            level = (group.nbytes + below) / count
            if count == len(levels) or level <= levels[count][0]:
                break
        for height, k in levels[:count]:
            given[k] = level - height
            loads[group.owners[k]] += given[k]

    def _cut(self) -> float:
        """What ranks must give that alone have something, per rank: for the n busiest, every n."""
        order = np.argsort(-np.array(self.loads), kind="stable")
        inside = self.base[order].astype(np.float64)
        if len(self._owners):
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
            last = np.maximum.reduceat(place[self._owners], self._first)
            inside += np.bincount(last, self._nbytes, len(order))
        return float((np.cumsum(inside) / np.arange(1, len(order) + 1)).max(initial=0.0))


def shared(groups: Sequence[Group], base: Ints, busiest_in: int) -> Shares:
    """Share groups out: near owners before far ones, where that makes no link busier than it must be.

    A rank may give as much as the busiest worker receives: the transfer ends no sooner if it gives
    less. Among owners that are as far the loads are level all the same.

    Args:
        groups: In an order of their contents alone, so that the outcome is the same everywhere.
        base: (ranks,) int64, bytes that each rank gives besides.
        busiest_in: The most bytes that one worker receives.
    """
    level = Shares(groups, base, [[0.0] * len(group.owners) for group in groups])
    level.pour(0.0)
    if not any(len(set(group.far)) > 1 for group in groups):
        return level
    allowed = max(level.busiest, float(busiest_in))
    penalty = allowed
    while penalty > allowed / 100:
        near = Shares(groups, base, [[0.0] * len(group.owners) for group in groups])
        near.pour(penalty)
        if near.busiest <= allowed * _NEAR:
            near.bound = max(near.bound, level.bound)
            return near
        penalty /= 2
    return level
