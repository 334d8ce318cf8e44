"""Keeps what was sent in confidence out of errors, which may quote a server that quotes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

_LEAST = 8
"""Characters from which a header's value is taken for a secret; blotting out a shorter one would
garble the server's words."""


class Secrets:
    """Values of headers, and a token.

    Args:
        headers: What is sent.
        token: A secret however short it is.
    """

    def __init__(self, headers: Mapping[str, str], token: str | None) -> None:
        # A server may quote the words of "Bearer abc" one by one.
        parts = {part for value in headers.values() for part in (value, *value.split())}
        secrets = {part for part in parts if len(part) >= _LEAST} | ({token} if token else set())
        # Longest first: one may contain another. A body has them with JSON's escapes.
        spellings = secrets | {json.dumps(secret)[1:-1] for secret in secrets}
        self._spellings = sorted(spellings, key=len, reverse=True)

    def cleaned(self, text: str) -> str:
        """The text without any of them."""
        for secret in self._spellings:
            text = text.replace(secret, "[secret]")
        return text

    def are_quoted_by(self, error: BaseException) -> bool:
        """Whether a traceback of the error would show one."""
        return any(s in str(cause) for cause in causes(error) for s in self._spellings)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
