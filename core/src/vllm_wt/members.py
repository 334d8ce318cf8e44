"""The engines of a session, which come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_wt.clients import as_clients
from vllm_wt.clients.http import HttpClient
from vllm_wt.connecting import Claim, connect_each
from vllm_wt.deadline import Deadline
from vllm_wt.engine import TrainerWeightTransferEngine
from vllm_wt.errors import InvalidInfo, shown
from vllm_wt.link import EngineLink


class Members:
    """The links to them, and the clients that were made for the session.

    Args:
        trainer: The trainer's side.
        clients: Of the first engines, which are yet to be connected.
        owned: Those of them that are closed with the session.
        claim: How engines are wanted.
    """

    def __init__(
        self,
        trainer: TrainerWeightTransferEngine,
        clients: Sequence[Any],
        owned: Iterable[HttpClient],
        claim: Claim,
    ) -> None:
        self.claim = claim
        self._trainer = trainer
        self._named = 0
        self._owned = list(owned)
        self.links = [EngineLink(client, trainer, self._new_name()) for client in clients]

    def add(
        self, engines: Any, deadline: Deadline, bring: Callable[[list[EngineLink]], None]
    ) -> list[str]:
        """Connect more; one that is there already, by address or as an object, takes its own place.

        Args:
            engines: As of `as_clients`.
            deadline: Of the whole.
            bring: What is done before they are members.

        Returns:
            Their names.

        Raises:
            WeightTransferError: As of `connect_each` and ``bring``; all is as it was then.
        """
        clients, owned = as_clients(engines)
        try:
            formers = [self._former(client) for client in clients]
            links = [
                EngineLink(client, self._trainer, former.name if former else self._new_name())
                for client, former in zip(clients, formers, strict=True)
            ]
            connect_each(self._trainer, links, deadline, self.claim)
            bring(links)
        except BaseException:
            close_all(owned)
            raise
        for former in formers:
            if former is not None:
                self._drop(former)
        self.links += links
        self._owned += owned
        return [link.name for link in links]

    def remove(self, name: Any) -> None:
        """Leave an engine to itself.

        Raises:
            InvalidInfo: There is none of that name.
        """
        link = next((link for link in self.links if link.name == name), None)
        if link is None:
            names = " or ".join(link.name for link in self.links)
            raise InvalidInfo(
                "The session has no such engine",
                where="name",
                expected=names or "none: it has no engines",
                got=shown(name),
                cure="see status() for the names",
            )
        if not link.caller.is_stuck:
            link.leave()
        self._drop(link)

    def leave(self) -> None:
        """Let those go on that were left paused, if they are known to be whole by now."""
        for link in self.links:
            link.leave()

    def close(self) -> None:
        """No engine is called any more."""
        self.claim.beacon.close()
        close_all(self._owned)

    def _new_name(self) -> str:
        self._named += 1
        return f"engine{self._named - 1}"

    def _former(self, client: Any) -> EngineLink | None:
        address = getattr(client, "address", None)
        for link in self.links:
            same = address is not None and getattr(link.client, "address", None) == address
            if same or link.client is client:
                return link
        return None

    def _drop(self, link: EngineLink) -> None:
        self.links.remove(link)
        if link.client in self._owned:
            self._owned.remove(link.client)
            link.client.close()


def close_all(clients: Iterable[HttpClient]) -> None:
    for client in clients:
        client.close()
