"""What a server's answer says: a success, a worker's typed error, its own words, or none of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_wt.clients.http.secrets import Secrets
from vllm_wt.clients.limits import parsed
from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    UnsupportedVllm,
    WeightTransferError,
    from_text,
)

_IS_IT_VLLM = (
    "check that the URL is that of a vLLM OpenAI server, and no other service or proxy page"
)
_NO_ROUTE = (
    "check host, port and path of the URL; a vLLM server has the route when it was started with "
    "VLLM_SERVER_DEV_MODE=1 and a weight_transfer_config (--weight-transfer-config)"
)
_CURES = {
    400: "mend what the server's words name; vLLM 0.25 to 0.33 is supported",
    401: "pass the token= that the server, or the proxy before it, asks for",
    403: "pass the token= that the server, or the proxy before it, asks for",
    404: _NO_ROUTE,
    422: "mend what the server's words name; vLLM 0.25 to 0.33 is supported",
    502: "wait until the server behind the proxy is up",
    503: "wait until the server is up and not paused",
    504: "wait until the server behind the proxy is up, and raise the proxy's own time limit",
}


@dataclass(frozen=True)
class Reply:
    """What a server sent.

    Args:
        where: Method and URL of the call.
        status: Of HTTP.
        location: Where a redirect leads.
        body: As far as it came.
        flaw: Why the body is not whole.
    """

    where: str
    status: int
    location: str
    body: bytes
    flaw: str | None


def answer(reply: Reply, key: str, secrets: Secrets) -> dict[str, Any]:
    """The JSON object of a good reply, which has ``key``.

    Raises:
        WeightTransferError: What a worker raised, typed.
        EngineError, UnsupportedVllm: The server refused or failed, in its words.
        CorruptTransfer: It is none of vLLM's answers.
    """
    data = parsed(reply.body)
    told = _words(data)
    words = secrets.cleaned(reply.body.decode(errors="replace") if told is None else told)
    if reply.status != 200:
        raise _refusal(reply, words, secrets)
    what_came = secrets.cleaned(reply.body.decode(errors="replace"))[:200]
    if reply.flaw is not None:
        raise CorruptTransfer(
            "The server's answer is not whole",
            where=reply.where,
            expected="a whole JSON object",
            got=f"{reply.flaw}: {what_came!r}",
            cure="look at the server's log, and at the proxy before it",
        )
    if not isinstance(data, dict):
        raise not_vllm(reply.where, "a JSON object", repr(what_came))
    if _says_no(data):
        typed = from_text(words, where=reply.where)
        if _is_typed(typed):
            raise typed
        raise CorruptTransfer(
            "The server answered an error as a success",
            where=reply.where,
            expected=f"HTTP 200 with {key!r}, or a status of its own for an error",
            got=f"HTTP 200: {words.strip()[:1000]}",
            cure=_IS_IT_VLLM,
        )
    if key not in data:
        raise not_vllm(reply.where, f"an object with {key!r}", repr(what_came))
    return data


def _refusal(reply: Reply, words: str, secrets: Secrets) -> WeightTransferError:
    """The error in a reply that is no success."""
    typed = from_text(words, where=reply.where)
    if _is_typed(typed):
        return typed
    what = "The engine failed"
    cure = _CURES.get(reply.status, "look at the server's log")
    got = f"HTTP {reply.status}: {words.strip()[:4000] or '(no words)'}"
    if 300 <= reply.status < 400:
        what = "The server sends the call elsewhere"
        got = f"HTTP {reply.status} to {secrets.cleaned(reply.location)[:500]!r}"
        cure = "give the URL that it leads to; redirects are not followed"
    elif reply.status in (401, 403):
        what = "The server does not let this caller in"
    elif reply.status == 404:
        return UnsupportedVllm(
            "The server has no such route",
            where=reply.where,
            expected="HTTP 200",
            got=got,
            cure=cure,
        )
    elif reply.status in (400, 422):
        what = "The server refused the call"
    elif reply.status < 300:
        return not_vllm(reply.where, "HTTP 200", got)
    return EngineError(what, where=reply.where, expected="HTTP 200", got=got, cure=cure)


def not_vllm(where: str, expected: str, got: str) -> CorruptTransfer:
    """The error for an answer of something else."""
    return CorruptTransfer(
        "The server's answer is none of vLLM's",
        where=where,
        expected=expected,
        got=got,
        cure=_IS_IT_VLLM,
    )


def _words(data: Any) -> str | None:
    """The server's own words in what it sent, if it has the form of an error of vLLM or FastAPI.

    ``{"error": {"message"}}`` (0.25+, and 0.32's handlers), ``{"error": text}`` (its routes),
    ``{"object": "error", "message"}`` (older), ``{"detail": text or list}`` (FastAPI).
    """
    match data:
        case {"error": str(text)} | {"error": {"message": str(text)}}:
            return text
        case {"message": str(text)} | {"detail": str(text)}:
            return text
        case {"detail": [{"msg": str()}, *_] as found}:
            return "; ".join(_validation(one) for one in found)
    return None


def _validation(one: Any) -> str:
    match one:
        case {"loc": list(loc), "msg": str(text)}:
            return f"{'.'.join(map(str, loc))}: {text}"
    return str(one)[:200]


def _says_no(data: Mapping[str, Any]) -> bool:
    return (
        data.get("error") not in (None, False, "")
        or data.get("ok") is False
        or data.get("success") is False
        or data.get("object") == "error"
        or "detail" in data
        or data.get("status") in ("error", "failed")
    )


def _is_typed(error: WeightTransferError) -> bool:
    """Whether ``from_text`` found our line in the text."""
    return type(error) is not EngineError or error.what != "The engine failed"
