"""The owner's end: takes in readers, and serves them."""

from __future__ import annotations

import time

import torch

from vllm_wt.errors import WeightTransferError
from vllm_wt_nccl.p2p.channel import Channel, Garbage
from vllm_wt_nccl.p2p.exposures import Exposures
from vllm_wt_nccl.p2p.listening import Listener
from vllm_wt_nccl.p2p.messages import STRANGERS_BYTES
from vllm_wt_nccl.p2p.session import Served, Session
from vllm_wt_nccl.p2p.slots import failed
from vllm_wt_nccl.p2p.tickets import Tickets

_CALL_S = 0.02
"""Most seconds of one :meth:`Owner.serve`."""
_QUIET_S = 0.001
"""It waits so long for more to do once something was done: readers go on within microseconds, whereas
it may be as long until the next call."""
_NAP_S = 0.00005
"""Between two looks when there is nothing to do: the fabric's threads, and readers, need the core."""
_MOST_STRANGERS = 64
"""Connections that have not said who is there; the oldest are closed."""
_MOST_SESSIONS = 1 << 12


class Owner:
    """Serves all readers of one transport.

    Args:
        device: Of the transport.
        exposures: What may be read.

    Attributes:
        tickets: What readers have reported.
        garbage: How many connections have said what makes no sense, and were closed.
    """

    def __init__(self, device: torch.device, exposures: Exposures) -> None:
        self.tickets = Tickets()
        self.garbage = 0
        self._served = Served(device, exposures, self.tickets)
        self._listener: Listener | None = None
        self._sessions: list[Session] = []

    @property
    def ways(self) -> tuple[tuple[str, int], ...]:
        """Where it can be connected to, from the first call on.

        Raises:
            TransportError: Nowhere.
        """
        if self._listener is None:
            self._listener = Listener()
        return self._listener.ways

    def serve(self) -> None:
        """Do what there is to do, for some milliseconds at most."""
        now = time.monotonic()
        end = now + _CALL_S
        quiet = now
        while now < end:
            moved = self.step()
            now = time.monotonic()
            if moved:
                quiet = now + _QUIET_S
            elif now >= quiet:
                return
            if not moved:
                time.sleep(_NAP_S)

    def step(self) -> bool:
        """Take in who has connected, and serve each once; whether there was anything to do."""
        if self._listener is None:
            return False
        moved = False
        for connected in self._listener.accepted():
            if len(self._sessions) >= _MOST_SESSIONS:
                connected.close()
                continue
            self._sessions.append(Session(Channel(connected, STRANGERS_BYTES), self._served))
            moved = True
        strangers = [session for session in self._sessions if session.is_stranger]
        for session in strangers[:-_MOST_STRANGERS]:
            self._close(session)
        for session in tuple(self._sessions):
            moved |= self._serve(session)
        return moved

    def revoked(self) -> None:
        """To be called once something was revoked: nothing of it is read any more on return."""
        self._served.work.finish()
        for session in self._sessions:
            if session.exposure is not None and session.exposure.region is None:
                session.revoked()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        for session in tuple(self._sessions):
            self._close(session)

    def _serve(self, session: Session) -> bool:
        try:
            moved = session.step()
        except Garbage:
            self.garbage += 1
            self._close(session)
            return True
        except WeightTransferError as error:
            session.fail(error)
            self._close(session)
            return True
        except RuntimeError as error:  # torch's: memory that there isn't, a GPU that has failed
            session.fail(failed(error, "progress"))
            self._close(session)
            return True
        if session.channel.is_gone:
            self._close(session)
        return moved

    def _close(self, session: Session) -> None:
        session.close()
        if session in self._sessions:
            self._sessions.remove(session)
