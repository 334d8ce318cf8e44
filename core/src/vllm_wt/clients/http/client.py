"""The client itself: what is called, and how often."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import httpx
from typing_extensions import Self

from vllm_wt.clients.http.arguments import checked_headers, checked_url, ssl_context
from vllm_wt.clients.http.failure import no_answer, transport_error
from vllm_wt.clients.http.guard import Guard
from vllm_wt.clients.http.reply import Reply, answer, not_vllm
from vllm_wt.clients.http.secrets import Secrets
from vllm_wt.clients.limits import call_limit_s, require_seconds, text_or_none, worker_count
from vllm_wt.deadline import INIT_S, ROUND_S, Deadline
from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, UnsupportedVllm, WrongOrder
from vllm_wt.methods import REPORT
from vllm_wt.pausing import PauseMode
from vllm_wt.reports import can_report, report_list

_MAX_BODY = 1 << 23
"""Bytes of a reply: an answer has some tens, and an error may quote the request."""
_RETRY_WAITS_S = (0.1, 0.2, 0.4)
"""Seconds between the tries of a GET."""
_PASSING = (502, 503, 504)
"""Statuses of a proxy whose server is not up."""
_NO_SUCH_CALL = (404, 405)
"""Statuses where there is no such route, or none for this method."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds that the calls may take, each a limit on the whole call, connecting included.

    Args:
        connect_s: Until the server has accepted a connection, for each of its addresses.
        query_s: A question (``world_size``, ``is_paused``, ``reports``), all its tries together.
        init_slack_s: What init may take beyond the ``deadline_s`` in its info.
        start_s: The call that opens a round.
        update_slack_s: What an update may take beyond the ``deadline_s`` in its info.
        finish_s: The call that commits a round.
        pause_s: Pausing, and resuming; the step in progress is waited for.

    Raises:
        InvalidInfo: One of them is not a number of seconds above 0.
    """

    connect_s: float = 10.0
    query_s: float = 30.0
    init_slack_s: float = 60.0
    start_s: float = 60.0
    update_slack_s: float = 60.0
    finish_s: float = ROUND_S
    pause_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            require_seconds(field.name, getattr(self, field.name))


_TIMEOUTS = Timeouts()


class HttpClient:
    """A vLLM OpenAI server, 0.25 to 0.33; has vLLM's four methods.

    Every call has a connection of its own: between two rounds a server closes an idle one (uvicorn
    after 5 s), and a POST that met that could not be sent again. So the client also stays usable
    after any error, and after an interrupt. The environment is ignored (httpx's
    ``trust_env=False``): no proxy and no netrc comes between trainer and engine. Redirects are not
    followed. Only the GETs (:meth:`world_size`, :meth:`weight_version`, :meth:`is_paused`) are tried
    again, up to four times in their time limit, when no answer came or a proxy said 502 to 504; a
    POST is never sent twice. The look-up of a host name is bounded by the system's resolver only.

    Args:
        url: Of the server: http or https, with the path that a proxy may have put before the
            routes.
        token: Sent as ``Authorization: Bearer``; it is in no error and no repr.
        verify: How to check an https server's certificate: True for the public authorities
            (certifi's), False not at all, or the path of a file with the authority's certificates
            in PEM, or an ``ssl.SSLContext``.
        headers: More headers for every request. Values of 8 characters or more are kept out of
            errors too.
        timeouts: Limits of the calls.

    Raises:
        InvalidInfo: One of the arguments is wrong.

    The methods raise:
        Timeout: The call did not end in time. A POST may still have its effect.
        PeerDead: Nobody answers, or the connection was dropped. A POST may have had its effect.
        TransportError: TLS failed.
        UnsupportedVllm: The server has no such route.
        EngineError: The server refused or failed; ``got`` has its status and words.
        CorruptTransfer: The answer is none of vLLM's.
        InvalidInfo: The info is not JSON.
        WrongOrder: The client is closed.
        WeightTransferError: What a worker raised, typed.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str | os.PathLike[str] | ssl.SSLContext = True,
        headers: Mapping[str, str] | None = None,
        timeouts: Timeouts = _TIMEOUTS,
    ) -> None:
        self._url = checked_url(url)
        if not isinstance(timeouts, Timeouts):
            raise InvalidInfo(
                "These are no time limits",
                where="timeouts",
                expected="a Timeouts",
                got=type(timeouts).__name__,
                cure="timeouts=Timeouts(start_s=30), say",
            )
        self._timeouts = timeouts
        sent = checked_headers(headers or {}, token)
        self._secrets = Secrets(sent, token)
        self._client = httpx.Client(
            headers={
                **sent,
                "Accept": "application/json",
                "Accept-Encoding": "identity",  # a small body could unpack to a huge one
                "Connection": "close",
                "User-Agent": "vllm-wt",
            },
            verify=ssl_context(verify, needed=self._url.startswith("https:")),
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @property
    def address(self) -> str:
        """The server's URL; names the engine in errors."""
        return self._url

    @property
    def host(self) -> str:
        """The server's host."""
        return httpx.URL(self._url).host

    def __repr__(self) -> str:
        return f"HttpClient({self._url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the client holds; idempotent."""
        self._client.close()

    # -- vLLM's methods --------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        slack_s = self._timeouts.init_slack_s
        limit_s = call_limit_s(init_info, default_s=INIT_S, slack_s=slack_s)
        body = {"init_info": init_info}
        self._post("/init_weight_transfer_engine", body, limit_s, "deadline_s or init_slack_s")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {}, self._timeouts.start_s, "start_s")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        slack_s = self._timeouts.update_slack_s
        limit_s = call_limit_s(update_info, default_s=ROUND_S, slack_s=slack_s)
        body = {"update_info": update_info}
        self._post("/update_weights", body, limit_s, "deadline_s or update_slack_s")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the round; vLLM before 0.27 does not keep the version."""
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body, self._timeouts.finish_s, "finish_s")

    def world_size(self) -> int:
        """Workers that receive weights: tensor times pipeline times data parallel."""
        reply = self._get("/get_world_size?include_dp=true")
        return worker_count(
            answer(reply, "world_size", self._secrets)["world_size"], where=reply.where
        )

    def weight_version(self) -> str | None:
        """The version that the last finish gave; None where vLLM keeps none (before 0.27)."""
        reply = self._get("/weight_info")
        if reply.status == 404:
            return None
        said = answer(reply, "weight_version", self._secrets)["weight_version"]
        return text_or_none(said, where=reply.where)

    def configured_backend(self) -> str | None:
        """See `vllm_wt.clients.protocol.WeightSyncClient`; None where the server does not tell."""
        reply = self._get("/server_info?config_format=json")
        if reply.status != 200:
            return None
        match answer(reply, "vllm_config", self._secrets)["vllm_config"]:
            case {"weight_transfer_config": {"backend": str(backend)}}:
                return backend
            case {"weight_transfer_config": None}:
                return ""
        return None

    def pause(self, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        """Stop generating. Harmless if it is paused already.

        Args:
            mode: What becomes of requests in flight; see `vllm_wt.pausing`. ``"wait"`` must come to its
                end within `Timeouts.pause_s`.
            clear_cache: Whether keys and values are thrown away, of kept requests too.

        Raises:
            UnsupportedVllm: The server cannot.
        """
        # Without a mode vLLM would abort them; since 0.32 other spellings are ignored, without a word.
        self._switch(f"/pause?mode={mode}" + ("" if clear_cache else "&clear_cache=false"))

    def resume(self) -> None:
        """Go on generating, after a :meth:`pause`; harmless without."""
        self._switch("/resume")

    def is_paused(self) -> bool | None:
        """Whether it is paused, by whomever; None where the server does not tell."""
        reply = self._get("/is_paused")
        if reply.status in _NO_SUCH_CALL:
            return None
        paused = answer(reply, "is_paused", self._secrets)["is_paused"]
        if not isinstance(paused, bool):
            raise not_vllm(reply.where, '{"is_paused": true or false}', repr(paused)[:200])
        return paused

    def reset_caches(self) -> None:
        """Throw away keys and values, and outputs of encoders; requests in flight are computed again.

        Raises:
            EngineError, CorruptTransfer: The server has no such route, or could not.
        """
        limit = Deadline(self._timeouts.pause_s)
        route = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        reply = self._exchange("POST", route, b"{}", limit, "pause_s")
        if reply.status != 200 or reply.body:  # older releases say no more
            told = answer(reply, "success", self._secrets)["success"]
            if told is not True:
                raise not_vllm(reply.where, '{"success": true}', repr(told)[:200])
        self._exchange("POST", "/reset_encoder_cache", b"{}", limit, "pause_s")

    def reports(self) -> list[dict[str, Any]] | None:
        """What each worker says of itself; None where the server does not tell, nor whose it is.

        With data parallel, vLLM gives the answers of the first replica.
        """
        if not can_report(self.configured_backend()):
            return None
        body = json.dumps({"method": REPORT}).encode()
        limit = Deadline(self._timeouts.query_s)
        reply = self._exchange("POST", "/collective_rpc", body, limit, "query_s")
        if reply.status in _NO_SUCH_CALL:
            return None
        told = answer(reply, "results", self._secrets)["results"]
        if told is None:
            raise not_vllm(reply.where, '{"results": [...]}', "null")
        return report_list(told, where=reply.where)

    # -- one call --------------------------------------------------------------------------------

    def _post(self, route: str, body: dict[str, Any], limit_s: float, limit: str) -> None:
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInfo(
                f"The info is not JSON: {error}",
                where=f"POST {self._url}{route}",
                expected="JSON",
                cure="send what WeightSync sends",
            ) from error
        reply = self._exchange("POST", route, content, Deadline(limit_s), limit)
        where, message = reply.where, answer(reply, "message", self._secrets)["message"]
        # All releases have one; another service's 200 must not pass for a delivery.
        if not isinstance(message, str):
            raise not_vllm(where, '{"message": text}', repr(message)[:200])

    def _switch(self, route: str) -> None:
        reply = self._exchange("POST", route, b"{}", Deadline(self._timeouts.pause_s), "pause_s")
        if reply.status in _NO_SUCH_CALL:
            raise UnsupportedVllm(
                "The server cannot be paused",
                where=reply.where,
                expected="HTTP 200",
                got=f"HTTP {reply.status}",
                cure="let the proxy before it pass /pause and /resume, and start a vLLM server with "
                "VLLM_SERVER_DEV_MODE=1",
            )
        status = answer(reply, "status", self._secrets)["status"]
        if not isinstance(status, str):
            raise not_vllm(reply.where, '{"status": text}', repr(status)[:200])

    def _get(self, route: str) -> Reply:
        deadline = Deadline(self._timeouts.query_s)
        for wait_s in _RETRY_WAITS_S:
            with suppress(PeerDead):
                reply = self._exchange("GET", route, None, deadline, "query_s")
                if reply.status not in _PASSING:
                    return reply
            if wait_s >= deadline.remaining():
                break
            time.sleep(wait_s)
        return self._exchange("GET", route, None, deadline, "query_s")

    def _exchange(
        self, method: str, route: str, content: bytes | None, deadline: Deadline, limit: str
    ) -> Reply:
        url = f"{self._url}{route}"
        where = f"{method} {url}"
        if self._client.is_closed:
            raise WrongOrder("The client is closed", where=where, cure="make a new HttpClient")
        # httpx limits each read and each write, so the guard limits their sum.
        left_s = max(deadline.remaining(), 0.001)
        connect_s = min(self._timeouts.connect_s, left_s)
        guard = Guard(left_s)
        try:
            with (
                guard,
                self._client.stream(
                    method,
                    url,
                    content=content,
                    headers={} if content is None else {"Content-Type": "application/json"},
                    timeout=httpx.Timeout(left_s, connect=connect_s),
                    extensions={"trace": guard.trace},
                ) as response,
            ):
                body, flaw = _read(response)
            if not guard.expired:
                location = response.headers.get("location", "")
                return Reply(where, response.status_code, location, body, flaw)
            cause: httpx.HTTPError | None = None
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectTimeout) and not guard.expired:
                raise Timeout(
                    "The server did not accept a connection",
                    where=where,
                    expected=f"within {connect_s:g} s",
                    cure="check host and port, and that no firewall drops the packets",
                ) from error
            if not guard.expired and not isinstance(error, httpx.TimeoutException):
                shown = None if self._secrets.are_quoted_by(error) else error
                raise transport_error(error, where, self._secrets) from shown
            cause = error
        raise Timeout(
            "The server did not answer",
            where=where,
            expected=f"a whole answer within {deadline.seconds:g} s",
            got=no_answer(method),
            cure=f"look for a stopped engine; raise {limit} if the call is just slow",
        ) from cause


def _read(response: httpx.Response) -> tuple[bytes, str | None]:
    """The body as far as it came, and why that is not all."""
    body = bytearray()
    try:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > _MAX_BODY:
                return bytes(body[:_MAX_BODY]), f"more than {_MAX_BODY} bytes"
    except httpx.TimeoutException:
        raise
    except httpx.TransportError as error:
        return bytes(body), f"broken off after {len(body)} bytes ({error})"
    return bytes(body), None
