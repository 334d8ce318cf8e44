"""A reader's end: a prepared plan, and one pass over it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_wt.errors import WrongOrder
from vllm_wt.transport import Progress
from vllm_wt_nccl.p2p import BACKEND
from vllm_wt_nccl.p2p.connection import Part, Share
from vllm_wt_nccl.p2p.regions import Region

_CALL_S = 0.02
"""Most seconds of one poll, beyond the bucket that is put in its places in it."""
_QUIET_S = 0.002
"""A poll waits so long for the next thing to happen: an owner looks at least every millisecond."""
_NAP_S = 0.00005
"""Between two looks: the fabric's threads need the core, and whoever verifies what has come."""


class Plan:
    """Copies that were checked, by owner.

    Args:
        region: Where they go.
        shares: Each owner's.
    """

    def __init__(self, region: Region, shares: Sequence[Share]) -> None:
        self.region = region
        self.shares = shares
        self.is_busy = False

    def forget(self) -> None:
        """Hold nothing of the region any more."""
        for share in self.shares:
            share.forget()


class Operation:
    """One pass over a plan; done when each owner's part is in its places.

    Args:
        plan: What is read.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_over = False
        """Whether nothing of it will be put in its place any more."""
        self._is_given_up = False
        self._parts = [Part(share, plan.region) for share in plan.shares]
        plan.is_busy = True
        for part in self._parts:
            part.share.connection.begin(part)

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def advance(self) -> Progress:
        """Drive the pass for some milliseconds at most.

        Raises:
            PeerDead, Revoked, CorruptTransfer: It has failed, and is given up.
            WrongOrder: It had failed, or was cancelled, before.
        """
        if self._is_given_up:
            raise WrongOrder(
                "This pass has ended", backend=BACKEND, where="poll", cure="submit the plan again"
            )
        try:
            end = time.monotonic() + _CALL_S
            quiet = time.monotonic() + _QUIET_S
            while not self.done:
                moved = self._step()
                now = time.monotonic()
                if moved:
                    quiet = now + _QUIET_S
                if now > end or now > quiet:
                    break
                if not moved:
                    time.sleep(_NAP_S)
        except BaseException:
            self.give_up()
            raise
        if self.done:
            self.is_over, self.plan.is_busy = True, False
        return Progress(self.done, sum(part.landed for part in self._parts))

    def give_up(self) -> None:
        """Put nothing more in its place."""
        if self.is_over:
            return
        self.is_over = self._is_given_up = True
        self.plan.is_busy = False
        for part in self._parts:
            part.share.connection.give_up(part)

    def has_drained(self) -> bool:
        """Whether what was given up keeps no GPU busy; a moment is waited for that."""
        return all(part.share.connection.has_drained(part) for part in self._parts)

    def _step(self) -> bool:
        moved = False
        for part in self._parts:
            connection = part.share.connection
            if part.done:
                continue
            moved |= connection.step()
            if part.failure is not None:
                raise part.failure.with_traceback(None)
            if not part.done:
                connection.require_up()
        return moved
