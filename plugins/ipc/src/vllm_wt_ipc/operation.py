"""A prepared plan and one pass over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vllm_wt.errors import WrongOrder
from vllm_wt.packing.host import HostCopies, Run
from vllm_wt.transport import Progress
from vllm_wt_ipc import BACKEND
from vllm_wt_ipc.batching import parts_of
from vllm_wt_ipc.connection import Connection
from vllm_wt_ipc.region import Region


class Mover(Protocol):
    """Prepared copies, made in any number of passes, one at a time."""

    def begin(self) -> None:
        """Begin a pass."""

    def advance(self) -> int:
        """Go on for some moments at most; how many bytes of the pass have landed."""

    def settle(self) -> None:
        """End the pass, whatever has landed: nothing is written afterwards."""


class HostMover:
    """Copies within the host's memory, a part in each call of :meth:`advance`.

    Args:
        runs: What to copy.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._parts = [
            (HostCopies(part), sum(run.nbytes for run in part)) for part in parts_of(runs)
        ]
        self._next = 0
        self._landed = 0

    def begin(self) -> None:
        self._next = self._landed = 0

    def advance(self) -> int:
        if self._next < len(self._parts):
            copies, nbytes = self._parts[self._next]
            copies.run()
            self._next += 1
            self._landed += nbytes
        return self._landed

    def settle(self) -> None:
        """It has: what writes is :meth:`advance`."""


@dataclass(eq=False)
class Plan:
    """What core holds.

    Args:
        region: Where the bytes go.
        owners: Whose memory they come from; hold the maps.
        mover: The copies.
        nbytes: Of all copies.
    """

    region: Region
    owners: tuple[Connection, ...]
    mover: Mover
    nbytes: int
    busy: bool = False


class Operation:
    """One pass over a plan: a look at each owner before the first byte, and after the last.

    The first look keeps a pass from starting on memory that was revoked, the other ones notice
    what was revoked while it was read.

    Raises:
        PeerDead, Revoked: Nothing was begun.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._done = False
        self._ended = False
        self._look()
        plan.busy = True
        try:
            plan.mover.begin()
        except BaseException:
            self.give_up()
            raise

    def advance(self) -> Progress:
        """Go on for some moments at most.

        Raises:
            PeerDead, Revoked, TransportError: The pass has failed.
            WrongOrder: It had failed, or was cancelled, before.
        """
        if self._done:
            return Progress(True, self.plan.nbytes)
        if self._ended:
            raise WrongOrder(
                "This pass has ended", backend=BACKEND, where="poll", cure="submit the plan again"
            )
        try:
            landed = self.plan.mover.advance()
            self._look()
        except BaseException:
            self._ended = True
            raise
        if landed == self.plan.nbytes:
            self._done, self.plan.busy = True, False
        return Progress(self._done, landed)

    def give_up(self) -> None:
        """Nothing is written any more afterwards. One that is done is left alone."""
        if not self._done:
            self._ended = True
            self.plan.mover.settle()
            self.plan.busy = False

    def _look(self) -> None:
        for owner in self.plan.owners:
            owner.look()
