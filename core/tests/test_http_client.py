"""The HTTP client against real servers on the loopback, which say what the tests give them."""

import contextlib
import gzip
import http.server
import json
import socket
import ssl
import subprocess
import threading
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_wt import registry
from vllm_wt.clients.http import HttpClient, Timeouts
from vllm_wt.clients.http import client as client_module
from vllm_wt.clients.http.guard import Guard
from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    InvalidInfo,
    PeerDead,
    Timeout,
    TornModel,
    TransportError,
    UnsupportedVllm,
    WeightTransferError,
    WrongOrder,
    to_text,
)

LIMIT_S = 60
SECRET = 's3cret/to"ken+with=all-sorts'
OK = {"message": "Weights updated"}
IS_IT_VLLM = (
    "check that the URL is that of a vLLM OpenAI server, and no other service or proxy page"
)
TORN = TornModel(
    'A "torn" model\nin two lines: \u00e9 \\',
    where="finish",
    expected="all",
    got="half",
    cure="push again",
    backend="x",
    ranks={0: 'no "memory"', 3: "gone"},
)
"""Has all that JSON escapes."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, body, dict(self.headers)))
        status, headers, answer = self.server.answers.pop(0)
        if not isinstance(answer, bytes):
            answer = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has enough
            self.wfile.write(answer)

    do_GET = do_POST = _serve

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    """Gives the answers it is told, in order, and keeps the requests."""

    daemon_threads = False  # so that closing it waits for them

    def __init__(self, context=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests = [], []
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.server_port}"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def say(self, answer, status=200, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append((status, named, answer))

    def handle_error(self, request, client_address):
        pass  # a client that did not like the certificate

    def stop(self):
        self.shutdown()
        self._thread.join(LIMIT_S)
        self.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with HttpClient(server.url) as client:
        yield client


@pytest.fixture
def raw():
    """A server that does to its connections, in order, what it is given; its URL."""
    with socket.socket() as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(LIMIT_S)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve(actions):
            for action in actions:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(LIMIT_S)
                    action(connection)

        def start(*actions):
            served.append(pool.submit(serve, actions))
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        served = []
        yield start
        for one in served:
            one.result(LIMIT_S)


def request_of(connection):
    """The head of the request, read; what came of it, if the client gave up before."""
    head = b""
    while b"\r\n\r\n" not in head and (more := connection.recv(1 << 16)):
        head += more
    return head


def say(answer):
    def action(connection):
        request_of(connection)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                pass

    return action


def whole(body, status=b"200 OK"):
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def text_of(error):
    """All that a log would have of it."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(error.facts())


CALLS = {
    "init": lambda client: client.init_weight_transfer_engine({"a": [1, None]}),
    "start": lambda client: client.start_weight_update(),
    "update": lambda client: client.update_weights({"op": "open"}),
    "finish": lambda client: client.finish_weight_update("7"),
    "world_size": lambda client: client.world_size(),
    "weight_version": lambda client: client.weight_version(),
}
ROUTES = {
    "init": "POST {}/init_weight_transfer_engine",
    "start": "POST {}/start_weight_update",
    "update": "POST {}/update_weights",
    "finish": "POST {}/finish_weight_update",
    "world_size": "GET {}/get_world_size?include_dp=true",
    "weight_version": "GET {}/weight_info",
}
every_call = pytest.mark.parametrize("name", CALLS)
every_post = pytest.mark.parametrize("name", ["init", "start", "update", "finish"])
every_get = pytest.mark.parametrize("name", ["world_size", "weight_version"])


# -- what is sent, and what comes back -----------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (CALLS["init"], "/init_weight_transfer_engine", {"init_info": {"a": [1, None]}}),
        (CALLS["start"], "/start_weight_update", {}),
        (CALLS["update"], "/update_weights", {"update_info": {"op": "open"}}),
        (CALLS["finish"], "/finish_weight_update", {"weight_version": "7"}),
        (lambda client: client.finish_weight_update(), "/finish_weight_update", {}),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/", "/a/b", "/a/b/"])
def test_posts(server, prefix, call, path, body):
    server.say(OK)
    with HttpClient(server.url + prefix, token=SECRET, headers={"X-Team": "rl"}) as client:
        assert call(client) is None
    [(method, got_path, got_body, headers)] = server.requests
    assert (method, got_path) == ("POST", prefix.rstrip("/") + path)
    assert json.loads(got_body) == body
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert headers["X-Team"] == "rl"
    assert (headers["Connection"], headers["Accept-Encoding"]) == ("close", "identity")


def test_gets(server, client):
    server.say({"world_size": 8})
    server.say({"weight_version": "v3"})
    server.say({"weight_version": None})
    server.say({"detail": "Not Found"}, 404)
    assert client.world_size() == 8
    assert [client.weight_version() for _ in range(3)] == ["v3", None, None]
    sent = [(method, path, body) for method, path, body, _ in server.requests]
    assert sent[:2] == [
        ("GET", "/get_world_size?include_dp=true", b""),
        ("GET", "/weight_info", b""),
    ]
    assert "Authorization" not in server.requests[0][3]


def test_pause_and_resume(server, client):
    server.say({"status": "paused"})
    server.say({"is_paused": True})
    server.say({"status": "resumed"})
    server.say({"is_paused": False})
    assert client.pause() is None
    assert client.is_paused() is True
    assert client.resume() is None
    assert client.is_paused() is False
    assert [(method, path, body) for method, path, body, _ in server.requests] == [
        ("POST", "/pause?mode=keep", b"{}"),
        ("GET", "/is_paused", b""),
        ("POST", "/resume", b"{}"),
        ("GET", "/is_paused", b""),
    ]


@pytest.mark.parametrize(
    ("mode", "clear_cache", "query"),
    [
        ("keep", False, "mode=keep&clear_cache=false"),
        ("wait", True, "mode=wait"),
        ("abort", False, "mode=abort&clear_cache=false"),
    ],
)
def test_how_to_pause(server, client, mode, clear_cache, query):
    server.say({"status": "paused"})
    client.pause(mode, clear_cache)
    assert server.requests[0][1] == f"/pause?{query}"


def test_caches_are_reset(server, client):
    server.say({"success": True})
    server.say({})
    client.reset_caches()
    assert [path for _, path, _, _ in server.requests] == [
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        "/reset_encoder_cache",
    ]


@pytest.mark.parametrize(
    ("reply", "status", "error"),
    [
        ({"success": False}, 200, WeightTransferError),
        ({"success": "yes"}, 200, CorruptTransfer),
        ({"detail": "Not Found"}, 404, WeightTransferError),
        ({"error": "boom"}, 500, EngineError),
    ],
)
def test_caches_that_are_not_reset(server, client, reply, status, error):
    server.say(reply, status)
    with pytest.raises(error) as caught:
        client.reset_caches()
    assert "/reset_prefix_cache" in caught.value.where
    assert len(server.requests) == 1


SWITCHES = {"pause": "/pause?mode=keep", "resume": "/resume"}
every_switch = pytest.mark.parametrize("name", SWITCHES)


@pytest.mark.parametrize("status", [404, 405])
@every_switch
def test_server_that_cannot_be_paused(server, client, name, status):
    server.say({"detail": "Because"}, status)
    with pytest.raises(UnsupportedVllm, match="cannot be paused") as caught:
        getattr(client, name)()
    error = caught.value
    assert error.where == f"POST {server.url}{SWITCHES[name]}"
    assert (error.expected, error.got) == ("HTTP 200", f"HTTP {status}")
    assert "VLLM_SERVER_DEV_MODE=1" in error.cure
    server.say({"detail": "Because"}, status)
    assert client.is_paused() is None


@every_switch
def test_pause_that_fails(server, client, name):
    server.say({"error": "Failed to pause generation: boom"}, 500)
    with pytest.raises(EngineError, match="boom"):
        getattr(client, name)()
    server.say({"status": "error"})
    with pytest.raises(CorruptTransfer, match="an error as a success"):
        getattr(client, name)()
    server.say(OK)
    with pytest.raises(CorruptTransfer, match="none of vLLM's"):
        getattr(client, name)()
    server.say({"status": 1})
    with pytest.raises(CorruptTransfer, match="none of vLLM's"):
        getattr(client, name)()
    assert len(server.requests) == 4  # none is sent twice


@every_switch
def test_pause_that_is_not_answered(raw, name):
    limits = Timeouts(pause_s=0.05)
    with HttpClient(raw(say(b"")), timeouts=limits) as client, pytest.raises(PeerDead):
        getattr(client, name)()
    done = threading.Event()
    url = raw(lambda connection: done.wait(LIMIT_S))
    with HttpClient(url, timeouts=limits) as client:
        with pytest.raises(Timeout) as caught:
            getattr(client, name)()
        done.set()
    assert caught.value.got == "no answer; the call may still have its effect"
    assert "raise pause_s" in caught.value.cure


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_is_paused_of_another_type(server, client, value):
    server.say({"is_paused": value})
    with pytest.raises(CorruptTransfer, match="none of vLLM's"):
        client.is_paused()


OURS = {"vllm_config": {"weight_transfer_config": {"backend": "wt_memory"}}}


@pytest.fixture
def backend(monkeypatch):
    """One backend, whatever else this environment has."""
    monkeypatch.setattr(
        registry, "default", lambda: types.SimpleNamespace(backends={"memory": None})
    )


@pytest.mark.usefixtures("backend")
def test_reports(server, client):
    told = [{"rank": 0, "why": "asked for"}, {"rank": 1, "error": None}]
    server.say(OURS)
    server.say({"results": told})
    assert client.reports() == told
    (_, asked, _, _), (method, path, body, headers) = server.requests
    assert asked == "/server_info?config_format=json"
    assert (method, path, json.loads(body)) == (
        "POST",
        "/collective_rpc",
        {"method": "vllm_wt_report"},
    )
    assert headers["Content-Type"] == "application/json"
    server.say(OURS)
    server.say({"results": [None, None]})
    assert client.reports() is None


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({"detail": "Not Found"}, 404),
        ({"vllm_config": "text"}, 200),
        ({"vllm_config": {"weight_transfer_config": None}}, 200),
        ({"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}, 200),
        ({"vllm_config": {"weight_transfer_config": {"backend": "other"}}}, 200),
    ],
    ids=["not in dev mode", "silent", "not configured", "vLLM's own", "another's"],
)
def test_workers_that_may_lack_the_method_are_not_asked(server, client, info, status):
    server.say(info, status)
    assert client.reports() is None
    assert [path for _, path, _, _ in server.requests] == ["/server_info?config_format=json"]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("status", [404, 405])
def test_server_without_the_route_tells_no_reports(server, client, status):
    server.say(OURS)
    server.say({"detail": "Because"}, status)
    assert client.reports() is None


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("body", "status", "cls", "words"),
    [
        ({"error": {"message": "boom"}}, 500, EngineError, "boom"),
        ({"error": to_text(TORN)}, 500, TornModel, "in two lines"),
        ({"error": "boom"}, 200, CorruptTransfer, "an error as a success"),
        (b"", 200, CorruptTransfer, "a JSON object"),
        ([{"rank": 0}], 200, CorruptTransfer, "a JSON object"),
        ({"result": []}, 200, CorruptTransfer, "an object with 'results'"),
        ({"results": None}, 200, CorruptTransfer, r'{"results": \[...\]}'),
        ({"results": {"rank": 0}}, 200, CorruptTransfer, "a list of objects"),
        ({"results": "[]"}, 200, CorruptTransfer, "a list of objects"),
        ({"results": [{"rank": 0}, f"{SECRET}"]}, 200, CorruptTransfer, "an object. Got: str"),
        ({"results": [{}, None]}, 200, CorruptTransfer, "an object. Got: NoneType"),
        ({"results": [[]]}, 200, CorruptTransfer, "an object. Got: list"),
        ({"results": [None] * ((1 << 14) + 1)}, 200, CorruptTransfer, "a list of 16385"),
    ],
)
def test_reports_of_another_form(server, body, status, cls, words):
    server.say(OURS)
    server.say(body, status)
    with HttpClient(server.url, token=SECRET) as client, pytest.raises(cls, match=words) as caught:
        client.reports()
    assert caught.value.cure
    assert SECRET not in text_of(caught.value)
    assert len(server.requests) == 2  # it is not asked again


@pytest.mark.usefixtures("backend")
def test_reports_that_are_too_long(server, client, monkeypatch):
    monkeypatch.setattr(client_module, "_MAX_BODY", 1000)
    server.say(OURS)
    server.say({"results": [{"why": "y" * (1 << 22)}]})
    with pytest.raises(CorruptTransfer, match="more than 1000 bytes"):
        client.reports()


@pytest.mark.usefixtures("backend")
def test_workers_that_do_not_answer(raw):
    done = threading.Event()
    info = say(whole(json.dumps(OURS).encode()))
    url = raw(info, lambda connection: done.wait(LIMIT_S))
    with HttpClient(url, timeouts=Timeouts(query_s=0.5)) as client:
        with pytest.raises(Timeout) as caught:
            client.reports()
        done.set()
    assert caught.value.where == f"POST {url}/collective_rpc"
    assert "raise query_s" in caught.value.cure


def test_server_that_closes_after_each_answer_is_no_matter(raw):
    answer = say(whole(b'{"message": "yes"}'))
    with HttpClient(raw(answer, answer, answer)) as client:
        for _ in range(3):
            client.start_weight_update()


def test_environment_is_ignored(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.say(OK)
    with HttpClient(server.url) as client:
        client.start_weight_update()


def test_closed_client(server):
    client = HttpClient(server.url)
    client.close()
    client.close()
    with pytest.raises(WrongOrder) as caught:
        client.start_weight_update()
    assert str(caught.value) == (
        f"The client is closed. Where: POST {server.url}/start_weight_update. "
        "Cure: make a new HttpClient."
    )


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "what", "got"),
    [
        ("ftp://host", "is neither http nor https", "ftp://host"),
        ("host:8000", "is neither http nor https", "host:8000"),
        ("", "is neither http nor https", ""),
        ("http://", "has no host", "http://"),
        ("http://host:99999", "has a port out of range", "http://host:99999"),
        ("http://host:port", "is no URL", "http://host:port"),
        ("http://a..b", "is no URL", "http://a..b"),
        ("http://ho st", "is no URL", "http://ho st"),
        (None, "is no URL", "None"),
        (f"http://me:{SECRET}@host", "has", "http://[secret]@host"),
        ("http://me:p4ss@host", "has credentials in it", "http://[secret]@host"),
        ("ftp://me:p4ss@host", "is neither http nor https", "ftp://[secret]@host"),
        ("http://host/?a=b", "has more than a path", "http://host/?a=b"),
        ("http://host/#a", "has more than a path", "http://host/#a"),
        ("http://host/p/v1/", "is that of vLLM's inference API", "http://host/p/v1/"),
    ],
)
def test_wrong_url(url, what, got):
    with pytest.raises(InvalidInfo) as caught:
        HttpClient(url)
    error = caught.value
    assert error.what.startswith(f"The server's URL {what}") or SECRET in url
    assert (error.where, error.got) == ("url", got)
    assert error.expected == "http://host:port or https://host:port, and maybe a path"
    cures = {"is neither": "put http://", "is that": "leave out the /v1"}
    cure = next((cure for start, cure in cures.items() if what.startswith(start)), "token=")
    assert cure in error.cure
    assert "p4ss" not in text_of(error)


@pytest.mark.parametrize("token", ["", " ", f"{SECRET}\n", f" {SECRET}", f"{SECRET}\u00e9", 5])
def test_wrong_token(token):
    with pytest.raises(InvalidInfo) as caught:
        HttpClient("http://host", token=token)
    assert str(caught.value) == (
        "The token cannot be sent. Where: token. Expected: printable ASCII, and not empty. "
        "Got: a value that is not shown. "
        "Cure: strip the line break if it was read from a file."
    )
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "token", "words"),
    [
        ({"": "a"}, None, "This header cannot be set"),
        ({"a b": "c"}, None, "This header cannot be set"),
        ({5: "c"}, None, "This header cannot be set"),
        ({"Content-Length": "9"}, None, "This header cannot be set"),
        ({"transfer-encoding": "chunked"}, None, "This header cannot be set"),
        ({"X": f"{SECRET}\r\nY: z"}, None, "The header 'X' has a wrong value"),
        ({"X": 5}, None, "The header 'X' has a wrong value"),
        ({"authorization": SECRET}, "abc", "There are two authorizations"),
    ],
)
def test_wrong_headers(headers, token, words):
    with pytest.raises(InvalidInfo, match=words) as caught:
        HttpClient("http://host", headers=headers, token=token)
    assert caught.value.where == "headers"
    assert SECRET not in text_of(caught.value)


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_wrong_verify(tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInfo) as caught:
        HttpClient("https://host", verify=path)
    assert caught.value.what.startswith("The authority's certificates cannot be read: ")
    assert caught.value.where == "verify"
    assert caught.value.got == repr(path)


@pytest.mark.parametrize("value", [0, -1, True, float("nan"), float("inf"), "5", None])
def test_wrong_timeouts(value):
    with pytest.raises(InvalidInfo) as caught:
        Timeouts(start_s=value)
    assert str(caught.value) == (
        "The field 'start_s' has a wrong value. Where: start_s. "
        f"Expected: seconds, more than 0. Got: {value!r}. Cure: leave it out for the default."
    )


@pytest.mark.parametrize("value", [object(), {1}, float("nan")])
def test_info_that_is_no_json(server, client, value):
    with pytest.raises(InvalidInfo) as caught:
        client.update_weights({"a": value})
    assert caught.value.what.startswith("The info is not JSON: ")
    assert caught.value.where == f"POST {server.url}/update_weights"
    assert server.requests == []


# -- what the server refuses, or what fails there ------------------------------------------------


FORMS = {
    "0.32": lambda text: {"error": {"message": text, "type": "x", "param": None, "code": 500}},
    "routes": lambda text: {"error": text},
    "old": lambda text: {"object": "error", "message": text, "type": "x", "code": 500},
    "fastapi": lambda text: {"detail": text},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@every_form
@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
def test_workers_error_arrives_as_it_was(server, client, form, status):
    server.say(form(f"Call to update failed: {to_text(TORN)}\nsee above"), status)
    with pytest.raises(TornModel) as caught:
        client.update_weights({})
    assert caught.value.facts() == TORN.facts()


@every_form
@every_post
def test_servers_own_words(server, client, form, name):
    server.say(form('It "broke"\nhere'), 500)
    with pytest.raises(EngineError) as caught:
        CALLS[name](client)
    assert str(caught.value) == (
        f"The engine failed. Where: {ROUTES[name].format(server.url)}. Expected: HTTP 200. "
        'Got: HTTP 500: It "broke"\nhere. Cure: look at the server\'s log.'
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "(no words)"),
        (b'{"a": 1}', '{"a": 1}'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 100_000, "[" * 4000),
        (
            b'{"detail": [{"loc": ["body", "init_info"], "msg": "Field required"}, 5]}',
            "body.init_info: Field required; 5",
        ),
        (
            b'{"error": "WT-E09 {\\"what\\":' + b"[" * 100_000 + b'"}',
            'WT-E09 {"what":' + 3985 * "[",
        ),
    ],
)
def test_words_in_other_forms(server, client, body, words):
    server.say(body, 500)
    with pytest.raises(EngineError) as caught:
        client.start_weight_update()
    assert caught.value.got == f"HTTP 500: {words}"


@pytest.mark.parametrize(
    ("status", "cls", "what", "cure"),
    [
        (400, EngineError, "The server refused the call", "mend what the server's words name"),
        (422, EngineError, "The server refused the call", "mend what the server's words name"),
        (401, EngineError, "The server does not let this caller in", "pass the token= that"),
        (403, EngineError, "The server does not let this caller in", "pass the token= that"),
        (
            404,
            UnsupportedVllm,
            "The server has no such route",
            "check host, port and path of the URL; a vLLM server has the route when it was started "
            "with VLLM_SERVER_DEV_MODE=1",
        ),
        (405, EngineError, "The engine failed", "look at the server's log"),
        (503, EngineError, "The engine failed", "wait until the server is up and not paused"),
    ],
)
@every_post
def test_statuses(server, client, name, status, cls, what, cure):
    server.say({"detail": "Because"}, status)
    with pytest.raises(cls) as caught:
        CALLS[name](client)
    error = caught.value
    assert type(error) is cls
    assert (error.what, error.where) == (what, ROUTES[name].format(server.url))
    assert (error.expected, error.got) == ("HTTP 200", f"HTTP {status}: Because")
    assert error.cure.startswith(cure)
    assert len(server.requests) == 1


def test_server_without_the_routes_has_no_world_size(server, client):
    server.say({"detail": "Not Found"}, 404)
    with pytest.raises(UnsupportedVllm, match="VLLM_SERVER_DEV_MODE=1"):
        client.world_size()


@every_call
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, client, name, status):
    server.say(b"", status, Location=f"{server.url}/elsewhere")
    with pytest.raises(EngineError) as caught:
        CALLS[name](client)
    assert str(caught.value) == (
        f"The server sends the call elsewhere. Where: {ROUTES[name].format(server.url)}. "
        f"Expected: HTTP 200. Got: HTTP {status} to '{server.url}/elsewhere'. "
        "Cure: give the URL that it leads to; redirects are not followed."
    )
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [200, 401, 404, 422, 500, 307])
@pytest.mark.parametrize("form", [lambda t: {"error": t}, str.encode, lambda t: {"x": t}])
def test_secrets_are_in_no_error(server, status, form):
    text = f"you sent Bearer {SECRET} and key {SECRET}-2"
    server.say(form(text), status, Location=f"/?{SECRET}")
    with HttpClient(server.url, token=SECRET, headers={"X-Key": f"{SECRET}-2"}) as client:
        with pytest.raises((EngineError, CorruptTransfer, UnsupportedVllm)) as caught:
            client.start_weight_update()
        assert "[secret]" in text_of(caught.value)
        for shown in (text_of(caught.value), repr(client), str(client)):
            assert SECRET not in shown
            assert json.dumps(SECRET)[1:-1] not in shown
        assert repr(client) == f"HttpClient('{server.url}')"


def test_secret_of_a_header_of_ones_own(server):
    server.say({"error": "no plain-token-1234 here"}, 401)
    client = HttpClient(server.url, headers={"authorization": "Bearer plain-token-1234"})
    with client, pytest.raises(EngineError) as caught:
        client.start_weight_update()
    assert caught.value.got == "HTTP 401: no [secret] here"


@pytest.mark.parametrize("location", ["http://[bad", "http://a:b:c", "\u00e9"])
def test_redirect_to_nowhere(server, client, location):
    server.say(b"", 302, Location=location)
    with pytest.raises((CorruptTransfer, EngineError)) as caught:
        client.start_weight_update()
    assert caught.value.where == f"POST {server.url}/start_weight_update"


def test_secrets_are_in_no_error_about_the_protocol(raw):
    token = "plain-token-1234"
    with HttpClient(raw(say(f"{token}\r\n\r\n".encode())), token=token) as client:
        with pytest.raises(CorruptTransfer, match=r"\[secret\]") as caught:
            client.start_weight_update()
        assert token not in text_of(caught.value)


# -- answers that are none of vLLM's -------------------------------------------------------------


@every_call
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'"yes"',
        b"<html>Welcome</html>",
        b'{"message": "yes"',
        b"\xff",
        b"[" * 100_000,
        b"{}",
        b'{"status": "fine"}',
    ],
)
def test_answer_of_another_form(server, client, name, body):
    server.say(body)
    with pytest.raises(CorruptTransfer) as caught:
        CALLS[name](client)
    error = caught.value
    assert error.what == "The server's answer is none of vLLM's"
    assert error.where == ROUTES[name].format(server.url)
    assert error.expected in (
        "a JSON object",
        *(f"an object with '{key}'" for key in ("message", "world_size", "weight_version")),
    )
    assert error.got == repr(body[:200].decode(errors="replace"))
    assert error.cure == IS_IT_VLLM


@every_call
@pytest.mark.parametrize(
    "body",
    [
        {"ok": False, "message": "no"},
        {"success": False, "message": "no"},
        {"status": "error", "message": "no"},
        {"error": "no", "message": "yes", "world_size": 1, "weight_version": "1"},
        {"error": {"message": "no"}},
        {"object": "error", "message": "no"},
        {"detail": "no"},
    ],
)
def test_error_that_calls_itself_a_success(server, client, name, body):
    server.say(body)
    with pytest.raises(CorruptTransfer) as caught:
        CALLS[name](client)
    error = caught.value
    assert error.what == "The server answered an error as a success"
    assert error.where == ROUTES[name].format(server.url)
    assert error.got == "HTTP 200: no"
    assert error.cure == IS_IT_VLLM


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ({"weight_transfer_config": {"backend": "wt_rdma"}}, "wt_rdma"),
        ({"weight_transfer_config": None}, ""),
        ({"weight_transfer_config": {"backend": 3}}, None),
        ({}, None),
        ("text", None),
    ],
    ids=["configured", "not configured", "odd", "silent", "no json"],
)
def test_configured_backend(server, client, config, backend):
    server.say({"vllm_config": config, "vllm_env": {}})
    assert client.configured_backend() == backend


@pytest.mark.parametrize("message", [None, 1, True, [], {}])
def test_message_of_another_type(server, client, message):
    server.say({"message": message})
    with pytest.raises(CorruptTransfer) as caught:
        client.update_weights({})
    assert (caught.value.expected, caught.value.got) == ('{"message": text}', repr(message))


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", None, []])
def test_world_size_of_another_type(server, client, value):
    server.say({"world_size": value})
    with pytest.raises(CorruptTransfer) as caught:
        client.world_size()
    assert str(caught.value) == (
        "The engine did not say how many workers it has. "
        f"Where: GET {server.url}/get_world_size?include_dp=true. "
        f"Expected: a whole number, 1 or more. Got: {value!r}. "
        "Cure: check that this is the address of a vLLM engine."
    )


@pytest.mark.parametrize("value", [1, True, [], {}])
def test_weight_version_of_another_type(server, client, value):
    server.say({"weight_version": value})
    with pytest.raises(CorruptTransfer, match=r"Expected: a string or null\.") as caught:
        client.weight_version()
    assert caught.value.got == repr(value)


@pytest.mark.parametrize("status", [201, 202, 204])
def test_other_successes(server, client, status):
    server.say(b"" if status == 204 else OK, status)
    with pytest.raises(CorruptTransfer) as caught:
        client.start_weight_update()
    assert caught.value.expected == "HTTP 200"
    assert caught.value.got.startswith(f"HTTP {status}: ")


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"message": "yes"}',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n12\r\n{"message": "yes"}\r\n',
    ],
)
def test_answer_that_breaks_off(raw, answer):
    with HttpClient(raw(say(answer))) as client, pytest.raises(CorruptTransfer) as caught:
        client.start_weight_update()
    error = caught.value
    assert error.what == "The server's answer is not whole"
    assert error.where.startswith("POST http://127.0.0.1:")
    assert error.expected == "a whole JSON object"
    assert error.got.startswith("broken off after 18 bytes (")
    assert error.got.endswith(': \'{"message": "yes"}\'')
    assert error.cure == "look at the server's log, and at the proxy before it"


@pytest.mark.parametrize("status", [200, 500])
def test_answer_that_is_too_long(server, client, monkeypatch, status):
    monkeypatch.setattr(client_module, "_MAX_BODY", 100)
    server.say({"message": "y" * (1 << 22)}, status)
    with pytest.raises(CorruptTransfer if status == 200 else EngineError) as caught:
        client.start_weight_update()
    if status == 200:
        assert caught.value.got.startswith('more than 100 bytes: \'{"message": "yyy')
    else:
        assert caught.value.got.startswith('HTTP 500: {"message": "yyy')
    assert len(caught.value.got) < 300


def test_packed_answer_is_not_unpacked(server, client):
    server.say(gzip.compress(json.dumps(OK).encode()), Content_Encoding="gzip")
    with pytest.raises(CorruptTransfer, match="a JSON object"):
        client.start_weight_update()


def test_other_protocol(raw):
    url = raw(say(b"SSH-2.0-OpenSSH_9\r\n\r\n"))
    with HttpClient(url) as client, pytest.raises(CorruptTransfer) as caught:
        client.start_weight_update()
    assert caught.value.expected == "HTTP/1.1"
    assert "SSH-2.0" in caught.value.got
    assert caught.value.cure == IS_IT_VLLM


# -- the server is gone, silent or slow ----------------------------------------------------------


@every_call
@pytest.mark.usefixtures("soon")
def test_nobody_listens(name):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with HttpClient(url) as client, pytest.raises(PeerDead) as caught:
            CALLS[name](client)
    assert str(caught.value) == (
        "No server answers: [Errno 111] Connection refused. "
        f"Where: {ROUTES[name].format(url)}. Cure: start the server, check the port."
    )


def test_unknown_host(monkeypatch):
    """A stand-in for the resolver, which may take its time to say so."""

    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with HttpClient("http://nowhere") as client, pytest.raises(PeerDead) as caught:
        client.start_weight_update()
    assert str(caught.value) == (
        "No server answers: [Errno -2] Name or service not known. "
        "Where: POST http://nowhere/start_weight_update. Cure: check the host name."
    )


@every_post
def test_dropped_connection(raw, name):
    url = raw(request_of, say(whole(b'{"message": "yes"}')))
    with HttpClient(url) as client:
        with pytest.raises(PeerDead) as caught:
            CALLS[name](client)
        error = caught.value
        assert error.what.startswith("The server dropped the connection: ")
        assert (error.where, error.expected) == (ROUTES[name].format(url), "an answer")
        assert error.got == "no answer; the call may still have its effect"
        assert error.cure.startswith("look at the server's log")
        CALLS[name](client)  # on a fresh connection


def drip(head, over):
    """Sends a byte now and then, for ever."""

    def action(connection):
        request_of(connection)
        with contextlib.suppress(OSError):
            connection.sendall(head)
            while not over.wait(0.02):
                connection.sendall(b"x")

    return action


@pytest.fixture
def over():
    over = threading.Event()
    yield over
    over.set()


SHORT = Timeouts(query_s=0.2, init_slack_s=0.1, start_s=0.2, update_slack_s=0.1, finish_s=0.2)
TIMED = {
    **CALLS,
    "init": lambda client: client.init_weight_transfer_engine({"deadline_s": 0.1}),
    "update": lambda client: client.update_weights({"deadline_s": 0.1}),
}
RAISE = {
    "init": "deadline_s or init_slack_s",
    "start": "start_s",
    "update": "deadline_s or update_slack_s",
    "finish": "finish_s",
    "world_size": "query_s",
    "weight_version": "query_s",
}


@every_call
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\n{"message": "yes"}',
    ],
    ids=["nothing", "head", "body", "end"],
)
def test_limit_is_on_the_whole_call(raw, over, name, head):
    # A limit that has passed leaves a question no time for another try.
    url = raw(
        drip(head, over), say(whole(b'{"message": "1", "world_size": 1, "weight_version": "1"}'))
    )
    with HttpClient(url, timeouts=SHORT) as client:
        with pytest.raises(Timeout) as caught:
            TIMED[name](client)
        effect = "; the call may still have its effect" if ROUTES[name].startswith("POST") else ""
        assert str(caught.value) == (
            f"The server did not answer. Where: {ROUTES[name].format(url)}. "
            f"Expected: a whole answer within 0.2 s. Got: no answer{effect}. "
            f"Cure: look for a stopped engine; raise {RAISE[name]} if the call is just slow."
        )
        over.set()
    with HttpClient(url) as client:
        CALLS[name](client)


def test_limit_is_on_a_request_too(raw, over):
    def reads_nothing(connection):
        over.wait(LIMIT_S)

    info = {"deadline_s": 0.1, "a": "x" * (1 << 24)}
    with HttpClient(raw(reads_nothing), timeouts=SHORT) as client, pytest.raises(Timeout) as caught:
        client.update_weights(info)
    assert caught.value.expected == "a whole answer within 0.2 s"
    over.set()


def test_connection_that_is_not_accepted():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # Until the queue is full, the kernel accepts.
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(HttpClient(url, timeouts=Timeouts(connect_s=0.2)))
        with pytest.raises(Timeout) as caught:
            client.start_weight_update()
    assert str(caught.value) == (
        f"The server did not accept a connection. Where: POST {url}/start_weight_update. "
        "Expected: within 0.2 s. "
        "Cure: check host and port, and that no firewall drops the packets."
    )


@pytest.mark.parametrize(
    ("info", "limit_s"), [({"deadline_s": 5}, 12), ({"deadline_s": 0.5}, 7.5), ({}, None)]
)
def test_limit_follows_the_info(monkeypatch, info, limit_s):
    seen = []
    monkeypatch.setattr(HttpClient, "_post", lambda *args: seen.append(args[3]))
    with HttpClient("http://host", timeouts=Timeouts(init_slack_s=7, update_slack_s=7)) as client:
        client.init_weight_transfer_engine(info)
        client.update_weights(info)
    assert seen == ([67, 307] if limit_s is None else [limit_s, limit_s])


# -- trying again --------------------------------------------------------------------------------

GOOD = say(whole(b'{"world_size": 1, "weight_version": "1"}'))


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(client_module, "_RETRY_WAITS_S", (0.001, 0.002, 0.003))


@every_get
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("failure", [request_of, say(whole(b"", b"503 No"))])
def test_questions_are_asked_again(raw, name, failures, failure):
    with HttpClient(raw(*[failure] * failures, GOOD)) as client:
        assert CALLS[name](client) in (1, "1")


@every_get
@pytest.mark.usefixtures("soon")
def test_questions_are_asked_four_times_at_most(raw, name):
    with HttpClient(raw(*[request_of] * 4, GOOD)) as client:
        with pytest.raises(PeerDead, match=r"Got: no answer\."):
            CALLS[name](client)
        assert CALLS[name](client) in (1, "1")


@every_get
@pytest.mark.parametrize("status", [400, 401, 500])
def test_refused_questions_are_not_asked_again(server, client, name, status):
    server.say({"detail": "no"}, status)
    with pytest.raises(EngineError, match=f"HTTP {status}: no"):
        CALLS[name](client)
    assert len(server.requests) == 1


@every_post
@pytest.mark.parametrize("status", [502, 503, 504])
def test_posts_are_never_sent_twice(server, client, name, status):
    server.say({"detail": "later"}, status)
    with pytest.raises(EngineError, match=f"HTTP {status}: later"):
        CALLS[name](client)
    assert len(server.requests) == 1


@pytest.mark.parametrize("event", ["http11.send_request_body", "http11.receive_response_headers"])
def test_interrupted_call_leaves_no_answer_for_the_next(raw, monkeypatch, event):
    def late(connection):
        with contextlib.suppress(OSError):
            connection.sendall(whole(b'{"world_size": 1}'))

    url = raw(late, say(whole(b'{"world_size": 2}')))
    trace = Guard.trace

    def interrupted(guard, name, info):
        trace(guard, name, info)
        if name.startswith(event):
            raise KeyboardInterrupt

    with HttpClient(url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Guard, "trace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.world_size()
        assert client.world_size() == 2


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=test", "-keyout", key, "-out", certificate]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate


@pytest.fixture
def tls_server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server = Server(context)
    yield server
    server.stop()


VERIFY = {
    "path": lambda path: path,
    "text": str,
    "context": lambda path: ssl.create_default_context(cafile=path),
    "not": lambda path: False,
}


@pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY)
def test_tls(tls_server, certificate, verify):
    tls_server.say(OK)
    tls_server.say({"world_size": 3})
    with HttpClient(tls_server.url, verify=verify(certificate)) as client:
        client.start_weight_update()
        assert client.world_size() == 3


def test_certificate_that_nobody_vouches_for(tls_server):
    with HttpClient(tls_server.url) as client, pytest.raises(TransportError) as caught:
        client.start_weight_update()
    error = caught.value
    assert error.what.startswith("TLS with the server failed: ")
    assert error.where == f"POST {tls_server.url}/start_weight_update"
    assert error.expected == "a certificate that verify= accepts"
    assert "self-signed certificate" in error.got
    assert error.cure.startswith("pass verify=<PEM file of the authority")
    assert tls_server.requests == []


def test_certificate_of_another_host(tls_server, certificate):
    url = tls_server.url.replace("127.0.0.1", "localhost")
    with HttpClient(url, verify=certificate) as client, pytest.raises(TransportError) as caught:
        client.start_weight_update()
    assert "localhost" in caught.value.got


def test_server_without_tls(server):
    url = server.url.replace("http:", "https:")
    with HttpClient(url, verify=False) as client, pytest.raises(TransportError) as caught:
        client.start_weight_update()
    assert "or use http:// if the server has no TLS" in caught.value.cure


def test_tls_server_that_says_nothing(over):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # the kernel accepts, and nobody shakes hands
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with HttpClient(url, timeouts=SHORT) as client, pytest.raises(Timeout) as caught:
            client.start_weight_update()
    assert caught.value.where == f"POST {url}/start_weight_update"


def test_limit_is_on_tls_too(tls_server, certificate, over, monkeypatch):
    """The limit cuts a connection that TLS has wrapped."""

    def dripping(handler):
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while not over.wait(0.02):
                handler.wfile.write(b"x")
        handler.close_connection = True

    monkeypatch.setattr(Handler, "do_POST", dripping)
    client = HttpClient(tls_server.url, verify=certificate, timeouts=SHORT)
    with client, pytest.raises(Timeout, match=r"^The server did not answer\."):
        client.start_weight_update()
    over.set()
