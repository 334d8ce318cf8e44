"""A link to an HTTP server that breaks once, at a call of the test's choice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

Call = tuple[str, str]
"""Route, and the ``op`` of an update or an empty text."""


class Link:
    """Forwards whole requests, one connection each.

    Args:
        url: Of the server behind it.
    """

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (target.hostname, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_before: Call | None = None
        self.cut_after: Call | None = None
        self.instead: dict[Call, Callable[[], None]] = {}
        self.calls: list[Call] = []

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                self._forward(client)

    def _forward(self, client: socket.socket) -> None:
        request = _whole_request(client)
        call = _call_of(request)
        self.calls.append(call)
        if call in self.instead:
            self.instead.pop(call)()
            return
        if call == self.cut_before:
            self.cut_before = None
            return
        with socket.create_connection(self._target) as server:
            server.sendall(request)
            answer = b"".join(iter(lambda: server.recv(65536), b""))
        if call == self.cut_after:
            self.cut_after = None
            return
        client.sendall(answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def cutting_link(url: str) -> Iterator[Link]:
    link = Link(url)
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        yield link
    finally:
        link.close()
        thread.join(10)


def _whole_request(client: socket.socket) -> bytes:
    with client.makefile("rb") as lines:
        head, length = b"", 0
        while (line := lines.readline()) not in {b"\r\n", b""}:
            head += line
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return head + b"\r\n" + lines.read(length)


def _call_of(request: bytes) -> Call:
    head, _, body = request.partition(b"\r\n\r\n")
    route = head.split(b" ")[1].decode().split("?")[0]
    info = json.loads(body).get("update_info") if body else None
    return route, info["op"] if info else ""
