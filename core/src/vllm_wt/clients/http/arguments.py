"""What a caller gives a client, checked; nothing that may be secret is shown."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from vllm_wt.errors import InvalidInfo

_OUR_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-length", "content-type", "transfer-encoding"}
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"([\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?)?")


def checked_url(url: Any) -> str:
    """The URL without its last slash."""

    def wrong(
        what: str, cure: str = "a token belongs into token=, other credentials into headers="
    ) -> InvalidInfo:
        # Whatever is before an @ may be a password.
        shown = re.sub(r"//.*@", "//[secret]@", url) if isinstance(url, str) else repr(url)
        return InvalidInfo(
            f"The server's URL {what}",
            where="url",
            expected="http://host:port or https://host:port, and maybe a path",
            got=shown[:200],
            cure=cure,
        )

    try:
        given = httpx.URL(url)  # which would quote a space
        if re.search(r"\s", url):
            raise wrong("is no URL")
        given.host.encode("idna")
    except (httpx.InvalidURL, TypeError, UnicodeError):
        raise wrong("is no URL") from None
    if given.scheme not in ("http", "https"):
        raise wrong("is neither http nor https", "put http:// or https:// before host and port")
    if not given.host:
        raise wrong("has no host")
    if given.port is not None and not 0 < given.port < 65536:
        raise wrong("has a port out of range")
    if given.userinfo:
        raise wrong("has credentials in it")
    if given.query or given.fragment or "?" in url or "#" in url:
        raise wrong("has more than a path")
    if given.path.rstrip("/").endswith("/v1"):
        raise wrong("is that of vLLM's inference API", "leave out the /v1 at its end")
    return str(given).rstrip("/")


def checked_headers(headers: Mapping[Any, Any], token: Any) -> dict[str, str]:
    """All headers to send; h11 would quote a wrong value in its error."""
    sent: dict[str, str] = {}
    if not isinstance(headers, Mapping):
        raise InvalidInfo(
            "These are no headers",
            where="headers",
            expected="a mapping of names to values",
            got=type(headers).__name__,
            cure='headers={"X-Name": "value"}, say',
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _OUR_HEADERS:
            raise InvalidInfo(
                "This header cannot be set",
                where="headers",
                expected=f"a header name, and none of {sorted(_OUR_HEADERS)}",
                got=repr(name)[:200],
                cure="leave it out: the client sets it itself",
            )
        if token is not None and name.lower() == "authorization":
            raise InvalidInfo(
                "There are two authorizations", where="headers", cure="pass token= or the header"
            )
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidInfo(
                f"The header {name!r} has a wrong value",
                where="headers",
                expected="printable ASCII",
                got="a value that is not shown",
                cure="strip line breaks and other control characters from it",
            )
        sent[name] = value
    if token is not None:
        if not isinstance(token, str) or not token.strip() or not _VALUE.fullmatch(token):
            raise InvalidInfo(
                "The token cannot be sent",
                where="token",
                expected="printable ASCII, and not empty",
                got="a value that is not shown",
                cure="strip the line break if it was read from a file",
            )
        sent["Authorization"] = f"Bearer {token}"
    return sent


def ssl_context(
    verify: bool | str | os.PathLike[str] | ssl.SSLContext, *, needed: bool
) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    if isinstance(verify, bool):
        # Without TLS there is no need to read all the authorities.
        return httpx.create_ssl_context(verify=verify and needed, trust_env=False)
    try:
        return ssl.create_default_context(cafile=os.fspath(verify))
    except (OSError, TypeError, ValueError) as error:
        raise InvalidInfo(
            f"The authority's certificates cannot be read: {error}",
            where="verify",
            expected="True, False, an ssl.SSLContext or the path of a PEM file",
            got=repr(verify)[:200],
            cure="give the PEM file of the authority that signed the server's certificate",
        ) from error
