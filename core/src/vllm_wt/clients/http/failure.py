"""Calls that got no answer, and why."""

from __future__ import annotations

import socket
import ssl

import httpx

from vllm_wt.clients.http.reply import not_vllm
from vllm_wt.clients.http.secrets import Secrets, causes
from vllm_wt.errors import PeerDead, TransportError, WeightTransferError


def transport_error(
    error: httpx.TransportError, where: str, secrets: Secrets
) -> WeightTransferError:
    """The typed error for one of httpx."""
    text = secrets.cleaned(str(error)) or type(error).__name__
    chain = list(causes(error))
    connecting = isinstance(error, httpx.ConnectError)
    for cause in chain:
        # Once connected, an end without TLS's goodbye is just an end.
        if isinstance(cause, ssl.SSLError) and (
            connecting or not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        ):
            return TransportError(
                f"TLS with the server failed: {text}",
                where=where,
                expected="a certificate that verify= accepts",
                got=secrets.cleaned(str(cause)),
                cure="pass verify=<PEM file of the authority that signed the server's "
                "certificate>, or use http:// if the server has no TLS",
            )
    if connecting:
        unknown_host = any(isinstance(cause, socket.gaierror) for cause in chain)
        return PeerDead(
            f"No server answers: {text}",
            where=where,
            cure="check the host name" if unknown_host else "start the server, check the port",
        )
    if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in text:
        return not_vllm(where, "HTTP/1.1", text)
    return PeerDead(
        f"The server dropped the connection: {text}",
        where=where,
        expected="an answer",
        got=no_answer(where),
        cure="look at the server's log; https:// if it has TLS",
    )


def no_answer(method: str) -> str:
    """What came of a call that was not answered; ``method`` may have the URL after it."""
    effect = "; the call may still have its effect" if method.startswith("POST") else ""
    return f"no answer{effect}"
