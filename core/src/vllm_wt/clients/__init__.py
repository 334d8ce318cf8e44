"""How a trainer reaches an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_wt.clients.http import HttpClient
from vllm_wt.errors import InvalidInfo, shown

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""vLLM's four, which anything that can be an engine has."""
_EXPECTED = (
    "a vllm.LLM, the URL of a vLLM server, or an object with vLLM's four weight-transfer methods"
)


def as_clients(engines: Any) -> tuple[list[Any], list[HttpClient]]:
    """Clients for what a caller has, and those among them that were made here.

    Args:
        engines: An ``LLM``, a URL, a client, or a sequence of them.

    Raises:
        InvalidInfo: One cannot be an engine, is given twice, or there is none.
    """
    several = isinstance(engines, Sequence) and not isinstance(engines, str)
    given = list(engines) if several else [engines]
    if not given:
        raise InvalidInfo(
            "There are no engines to connect to",
            where="engines",
            expected=_EXPECTED,
            got="none",
            cure="give at least one",
        )
    for index, engine in enumerate(given):
        # By identity: objects may compare in ways of their own, but two equal URLs are one engine.
        same = [
            o
            for o in given[:index]
            if o is engine or (isinstance(o, str) and isinstance(engine, str) and o == engine)
        ]
        if same:
            raise InvalidInfo(
                "An engine is given twice",
                where=f"engines[{index}]",
                expected="each engine once",
                got=shown(engine),
                cure="leave one of them out",
            )
    owned: list[HttpClient] = []
    try:
        clients = [_as_client(engine, owned) for engine in given]
    except BaseException:
        for client in owned:
            client.close()
        raise
    return clients, owned


def _as_client(engine: Any, owned: list[HttpClient]) -> Any:
    if isinstance(engine, str):
        owned.append(HttpClient(engine))
        return owned[-1]
    # vLLM's classes are recognised without importing vllm.
    if hasattr(engine, "llm_engine"):
        from vllm_wt.clients.local import LocalClient

        return LocalClient(engine)
    if type(engine).__name__ == "AsyncLLM":
        raise InvalidInfo(
            "An AsyncLLM needs to be given with its event loop",
            where="engines",
            expected=_EXPECTED,
            got="AsyncLLM",
            cure="vllm_wt.clients.local.AsyncLocalClient(engine, asyncio.get_running_loop()), and "
            "call WeightSync from a thread: await asyncio.to_thread(sync.push, version)",
        )
    missing = [name for name in METHODS if not callable(getattr(engine, name, None))]
    if missing:
        raise InvalidInfo(
            "This cannot be an engine",
            where="engines",
            expected=_EXPECTED,
            got=f"{type(engine).__name__} without {', '.join(missing)}",
            cure="wrap it in an object that has them",
        )
    return engine


def hosts_of(clients: Sequence[Any]) -> tuple[str, ...]:
    """The hosts that engines are reached on, each once; of those on this host there may be none."""
    hosts = (getattr(client, "host", None) for client in clients)
    return tuple(dict.fromkeys(host for host in hosts if isinstance(host, str) and host))
