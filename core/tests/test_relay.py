"""Calls across a local socket, between threads of this process and to another one."""

import contextlib
import errno
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_wt.clients import relay
from vllm_wt.clients.limits import call_limit_s
from vllm_wt.clients.relay import ENGINE_METHODS, RelayClient, RelayServer, engine_methods
from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    InvalidInfo,
    PeerDead,
    Superseded,
    Timeout,
    TornModel,
    UnsupportedVllm,
)

SCRIPT = Path(__file__).parent / "support" / "relay_process.py"
LIMIT_S = 60
DEEP = b"[" * 100_000
"""Too deep for Python's JSON reader."""


class Methods:
    """What the tests' server can be asked for."""

    def __init__(self) -> None:
        self.error: Exception = RuntimeError("not set")
        self.entered = threading.Event()
        self.leave = threading.Event()

    def echo(self, *args):
        return list(args)

    def fail(self):
        raise self.error

    def block(self):
        self.entered.set()
        assert self.leave.wait(LIMIT_S)
        return "left"

    def a_set(self):
        return {1}

    def all(self):
        return {name: getattr(self, name) for name in ("echo", "fail", "block", "a_set")}


@pytest.fixture
def methods():
    methods = Methods()
    yield methods
    methods.leave.set()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "relay.sock"


@pytest.fixture
def server(path, methods):
    server = RelayServer(path, methods.all())
    yield server
    methods.leave.set()
    server.close()


@pytest.fixture
def connect(server, path):
    clients = []

    def connect(timeout_s: float = LIMIT_S) -> RelayClient:
        clients.append(RelayClient(path, timeout_s=timeout_s))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize(
    "args", [(), (None,), (1, "two", [3.5]), ({"a": {"b": [True, None]}},), ("line\nbreak",)]
)
def test_arguments_and_result_cross(connect, args):
    assert connect().call("echo", *args) == list(args)


def test_none_is_a_result(path):
    server = RelayServer(path, {"nothing": lambda: None})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.call("nothing") is None
    client.close()
    server.close()


def test_engine_methods_reach_the_engine(path):
    calls = []

    class Engine:
        def init_weight_transfer_engine(self, info):
            calls.append(("init", info))

        def start_weight_update(self):
            calls.append(("start",))

        def update_weights(self, info):
            calls.append(("update", info))

        def finish_weight_update(self, version=None):
            calls.append(("finish", version))

        def world_size(self):
            return 2

        def weight_version(self):
            return "v7"

        def configured_backend(self):
            return "rdma"

        def pause(self):
            calls.append(("pause",))

        def resume(self):
            calls.append(("resume",))

        def is_paused(self):
            return True

        def reset_caches(self):
            calls.append(("reset",))

        def reports(self):
            return [{"rank": 0}]

        def generate(self):
            raise AssertionError("not for a trainer")

    methods = engine_methods(Engine())
    assert tuple(methods) == ENGINE_METHODS
    server = RelayServer(path, methods)
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.init_weight_transfer_engine({"a": 1}) is None
    client.start_weight_update()
    client.update_weights({"b": 2})
    client.finish_weight_update("v7")
    client.finish_weight_update()
    assert client.world_size() == 2
    assert client.weight_version() == "v7"
    client.pause()
    client.resume()
    assert client.is_paused() is True
    client.reset_caches(at_once=False)
    assert client.reports() == [{"rank": 0}]
    client.close()
    server.close()
    assert calls == [
        ("init", {"a": 1}),
        ("start",),
        ("update", {"b": 2}),
        ("finish", "v7"),
        ("finish", None),
        ("pause",),
        ("resume",),
        ("reset",),
    ]


class FourMethods:
    """No more than vLLM's own."""

    def init_weight_transfer_engine(self, info): ...

    def start_weight_update(self): ...

    def update_weights(self, info): ...

    def finish_weight_update(self, version=None): ...


def test_engine_with_the_four_methods_only():
    assert tuple(engine_methods(FourMethods())) == ENGINE_METHODS[:4]


@pytest.mark.parametrize("given", [("wait", True), ("keep", False)])
def test_how_to_pause(path, given):
    asked = []

    class Engine(FourMethods):
        def pause(self, mode="keep", clear_cache=True):
            asked.append((mode, clear_cache))

        def resume(self): ...

    server = RelayServer(path, engine_methods(Engine()))
    client = RelayClient(path, timeout_s=LIMIT_S)
    client.pause(*given)
    client.close()
    server.close()
    assert asked == [given]


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_engine_that_cannot_be_paused(path, method):
    server = RelayServer(path, engine_methods(FourMethods()))
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.is_paused() is None
    assert client.reset_caches() is None
    with pytest.raises(UnsupportedVllm, match="cannot be paused") as caught:
        getattr(client, method)()
    assert caught.value.where == method
    assert "AsyncLocalClient" in caught.value.cure
    client.close()
    server.close()


def test_a_pause_that_is_refused_is_passed_on(path):
    def refuse():
        raise InvalidInfo("odd", where="mode", got="keep")

    server = RelayServer(path, {"pause": refuse, "is_paused": lambda: 1})
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(InvalidInfo, match="odd"):
        client.pause()
    with pytest.raises(CorruptTransfer, match="whether it is paused") as caught:
        client.is_paused()
    assert (caught.value.where, caught.value.got) == ("is_paused", "1")
    client.close()
    server.close()


def test_a_bare_llm_is_no_client():
    class LLM(FourMethods):  # what a vllm.LLM looks like
        llm_engine = object()

    with pytest.raises(InvalidInfo) as caught:
        engine_methods(LLM())
    assert str(caught.value) == (
        "LLM is an engine, whose methods have other arguments than a client's. Where: client. "
        "Expected: a client of the engine. Got: LLM. "
        "Cure: pass vllm_wt.clients.local.LocalClient(llm)."
    )


@pytest.mark.parametrize("lacking", ENGINE_METHODS[:4])
def test_what_lacks_a_method_is_no_client(monkeypatch, lacking):
    monkeypatch.setattr(FourMethods, lacking, None)
    with pytest.raises(InvalidInfo) as caught:
        engine_methods(FourMethods())
    assert str(caught.value) == (
        "FourMethods is no client of an engine. Where: client. "
        f"Expected: the methods {', '.join(ENGINE_METHODS[:4])}. Got: none called {lacking}. "
        "Cure: pass vllm_wt.clients.local.LocalClient(llm) for a vllm.LLM."
    )


@pytest.mark.parametrize("answer", [0, -1, True, 2.0, "2", [2]])
def test_number_of_workers_is_checked(path, answer):
    server = RelayServer(path, {"world_size": lambda: answer})
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(CorruptTransfer) as caught:
        client.world_size()
    assert str(caught.value) == (
        "The engine did not say how many workers it has. Where: world_size. "
        f"Expected: a whole number, 1 or more. Got: {answer!r}. "
        "Cure: check that this is the address of a vLLM engine."
    )
    client.close()
    server.close()


@pytest.mark.parametrize("method", ["weight_version", "configured_backend"])
@pytest.mark.parametrize(("answer", "error"), [(None, None), ("v1", None), (7, CorruptTransfer)])
def test_texts_are_checked(path, method, answer, error):
    server = RelayServer(path, {method: lambda: answer})
    client = RelayClient(path, timeout_s=LIMIT_S)
    if error is None:
        assert getattr(client, method)() == answer
    else:
        with pytest.raises(error, match=r"Expected: a string or null\. Got: 7\."):
            getattr(client, method)()
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (7, "int"),
        ("text", "str"),
        ({"rank": 0}, "dict"),
        ([{}, "text"], "str"),
        ([{}, None], "NoneType"),
        ([[]], "list"),
    ],
)
def test_reports_are_checked(path, answer, got):
    server = RelayServer(path, {"reports": lambda: answer})
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(CorruptTransfer, match="report of itself") as caught:
        client.reports()
    assert caught.value.got == got
    assert caught.value.where.startswith("reports")
    assert caught.value.cure
    client.close()
    server.close()


@pytest.mark.parametrize("answer", [None, [None, None]])
def test_workers_that_tell_nothing(path, answer):
    server = RelayServer(path, {"reports": lambda: answer})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.reports() is None
    client.close()
    server.close()


@pytest.mark.parametrize(
    "method", ["world_size", "weight_version", "configured_backend", "reports"]
)
def test_what_the_served_client_need_not_have(path, method):
    def odd():
        raise InvalidInfo("odd", where="elsewhere")

    server = RelayServer(path, {"odd": odd})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert getattr(client, method)() is None
    server.close()
    client.close()
    server = RelayServer(path, {method: odd})
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(InvalidInfo, match="odd"):
        getattr(client, method)()
    client.close()
    server.close()


# -- errors of the methods -----------------------------------------------------------------------


def test_unknown_method_names_what_there_is(connect):
    client = connect()
    with pytest.raises(InvalidInfo) as caught:
        client.call("reboot", 1)
    assert str(caught.value) == (
        "The relay has no method 'reboot'. Where: method. "
        "Expected: one of ['a_set', 'block', 'echo', 'fail']. Got: reboot. "
        "Cure: use one of these methods."
    )
    assert client.call("echo", 1) == [1]


@pytest.mark.parametrize("cls", [TornModel, Superseded, PeerDead, Timeout, InvalidInfo])
def test_typed_error_keeps_its_type_and_facts(connect, methods, cls):
    methods.error = cls(
        "It broke",
        where="seal",
        expected=[1],
        got="2",
        cure="mend it",
        backend="x",
        ranks={1: "no"},
    )
    client = connect()
    with pytest.raises(cls) as caught:
        client.call("fail")
    assert type(caught.value) is cls
    assert caught.value.facts() == methods.error.facts()
    assert client.call("echo", 1) == [1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no memory"), "RuntimeError: no memory"),
        (KeyError("layer"), "KeyError: 'layer'"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_other_error_keeps_its_words(connect, methods, error, words):
    methods.error = error
    with pytest.raises(EngineError) as caught:
        connect().call("fail")
    assert (caught.value.where, caught.value.got) == ("fail", words.strip())


def test_text_of_vllm_around_a_typed_error(connect, methods):
    line = 'WT-E09 {"code": "E09", "what": "torn", "ranks": {"0": "oom"}}'
    methods.error = RuntimeError(f"Worker failed with error 'x\n{line}', see above")
    with pytest.raises(TornModel, match=r"torn\. Ranks: rank 0: oom\."):
        connect().call("fail")


def test_wrong_arguments(connect):
    with pytest.raises(EngineError, match=r"TypeError: .*takes 1 positional argument but 2"):
        connect().call("block", 1)


def test_result_that_is_no_json(connect):
    client = connect()
    with pytest.raises(EngineError, match=r"TypeError: .*set is not JSON serializable"):
        client.call("a_set")
    assert client.call("echo", 1) == [1]


# -- the other end is gone, silent or wrong ------------------------------------------------------


def test_no_server(path):
    with pytest.raises(PeerDead) as caught:
        RelayClient(path)
    assert str(caught.value) == (
        f"No engine answers at {path}: [Errno 2] No such file or directory. Where: {path}. "
        "Expected: the socket of a RelayServer. Got: FileNotFoundError. "
        "Cure: start the engine first."
    )


def test_server_killed_during_a_call(path, pool):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path)], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "serving\n"
            client = RelayClient(path, timeout_s=LIMIT_S)
            call = pool.submit(client.call, "hang")
            assert process.stdout.readline() == "hanging\n"
        finally:
            process.kill()
        with pytest.raises(PeerDead, match=r"^The engine's process has gone\b.*Where: hang\."):
            call.result(LIMIT_S)
    with pytest.raises(PeerDead, match=r"^The engine's process has gone\b.*Where: again\."):
        client.call("again")
    client.close()
    with pytest.raises(PeerDead, match="Connection refused"):  # the socket's file is still there
        RelayClient(path)


def test_no_answer_in_time(connect, methods):
    client = connect(timeout_s=0.2)
    with pytest.raises(Timeout) as caught:
        client.call("block")
    assert str(caught.value) == (
        "The engine's process did not answer. Where: block. Expected: within 0.2 s. "
        "Cure: look for a stopped engine."
    )
    assert client._socket.fileno() == -1
    methods.leave.set()
    # A late answer must not be taken for that of the next call.
    with pytest.raises(PeerDead, match=r"Where: echo\."):
        client.call("echo", 1)
    assert connect().call("echo", 2) == [2]


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"method": "echo"}',
        b'{"method": ["echo"], "args": []}',
        b'{"method": "echo", "args": "ab"}',
        DEEP,
    ],
)
def test_line_that_is_no_call(server, path, line):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(str(path))
        with raw.makefile("rb") as lines:
            raw.sendall(line + b"\n")
            said = json.loads(lines.readline())["error"]
            assert said.startswith("This is no call. Expected: {")
            assert f"Got: {(line + bytes([10]))[:200]!r}." in said
            raw.sendall(b'{"method": "echo", "args": [1]}\n')
            assert json.loads(lines.readline()) == {"result": [1]}


@pytest.fixture
def raw_server(path):
    """Accepts one connection, and answers its first line by what it is given."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(LIMIT_S)
        listener.bind(str(path))
        listener.listen()

        def serve(answer: bytes) -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(LIMIT_S)
                lines.readline()
                connection.sendall(answer)

        yield lambda answer: pool.submit(serve, answer)


@pytest.mark.parametrize("answer", [b"garbage", b"[1]", b"{}", b'{"error": 1}', b"\xff", DEEP])
def test_answer_of_another_form(raw_server, path, answer):
    raw_server(answer + b"\n")
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(CorruptTransfer) as caught:
        client.call("echo")
    assert caught.value.where == "echo"
    assert caught.value.expected == '{"result": ...} or {"error": text}, in a line'
    assert caught.value.got == repr((answer + b"\n")[:200])
    with pytest.raises(PeerDead, match=r"Where: again\."):
        client.call("again")


def test_half_an_answer(raw_server, path):
    raw_server(b'{"result": 1}')
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(PeerDead, match=r"^The engine's process has gone\. Where: echo\."):
        client.call("echo")
    client.close()


def test_typed_line_that_is_too_deep_is_just_words(raw_server, path):
    text = 'WT-E09 {"code":' + DEEP.decode()
    raw_server(json.dumps({"error": text}).encode() + b"\n")
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(EngineError) as caught:
        client.call("echo")
    assert caught.value.got == text[:4000]
    client.close()


def test_call_that_is_not_whole_is_not_made(server, path):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(str(path))
        raw.sendall(b'{"method": "echo", "args": []}')
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(100) == b""


@pytest.mark.parametrize("argument", [object(), {1}, "deep"])
def test_arguments_that_are_no_json(connect, argument):
    if argument == "deep":
        argument = []
        for _ in range(100_000):
            argument = [argument]
    client = connect()
    with pytest.raises(InvalidInfo, match=r"^The arguments are not JSON: .*Where: echo\."):
        client.call("echo", argument)
    assert client.call("echo", 1) == [1]


@pytest.fixture
def dripping(path):
    """A server that sends a byte of a line now and then, and never its end, until hung up on."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(LIMIT_S)
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not over.wait(0.02):
                    connection.sendall(b"[")

        serving = pool.submit(serve)
        yield
        over.set()
        serving.result(LIMIT_S)


@pytest.mark.parametrize(
    ("timeout_s", "call", "said"),
    [
        (0.3, ("start_weight_update",), "0.3"),
        (LIMIT_S, ("update_weights", {"deadline_s": 0.1}), "0.35"),
        (LIMIT_S, ("init_weight_transfer_engine", {"deadline_s": 0.1}), "0.35"),
    ],
)
def test_limit_is_on_the_whole_call(dripping, path, monkeypatch, timeout_s, call, said):
    monkeypatch.setattr(relay, "_SLACK_S", 0.25)
    client = RelayClient(path, timeout_s=timeout_s)
    with pytest.raises(Timeout) as caught:
        client.call(*call)
    assert str(caught.value) == (
        f"The engine's process did not answer. Where: {call[0]}. Expected: within {said} s. "
        "Cure: look for a stopped engine."
    )


def test_limit_is_on_a_request_too(path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as listener:  # accepts and does not read
        listener.bind(str(path))
        listener.listen()
        client = RelayClient(path, timeout_s=0.2)
        with pytest.raises(Timeout, match=r"Where: echo\. Expected: within 0\.2 s\."):
            client.call("echo", "x" * (1 << 24))


@pytest.mark.parametrize(
    ("info", "limit_s"),
    [
        ({"deadline_s": 5}, 7.0),
        ({"deadline_s": 0.5}, 2.5),
        ({"deadline_s": 86400}, 86402.0),
        ({}, 12.0),
        ([], 12.0),
        *(({"deadline_s": wrong}, 12.0) for wrong in (True, 0, -1, 86401, "5", None, math.nan)),
    ],
)
def test_limit_of_a_call_with_an_info(info, limit_s):
    assert call_limit_s(info, default_s=10, slack_s=2) == limit_s


def test_answer_that_is_too_long(raw_server, path, monkeypatch):
    monkeypatch.setattr(relay, "_MAX_LINE", 1000)
    raw_server(b'{"result": "' + b"x" * 2000 + b'"}')
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(CorruptTransfer, match=r"Where: echo\. Expected: .*, in a line\."):
        client.call("echo")


# -- several clients -----------------------------------------------------------------------------


def test_two_clients_each_get_their_own_answers(connect, pool):
    one, two = connect(), connect()
    calls = [
        pool.submit(lambda c=client, n=name: [c.call("echo", n, i) for i in range(50)])
        for name, client in (("one", one), ("two", two))
    ]
    for name, call in zip(("one", "two"), calls, strict=True):
        assert call.result(LIMIT_S) == [[name, i] for i in range(50)]


def test_calls_of_two_clients_do_not_overlap(path, pool):
    entered, sent, second = threading.Event(), threading.Event(), threading.Event()

    def first() -> bool:
        entered.set()
        sent.wait(LIMIT_S)
        return second.wait(0.2)  # would be set at once if calls overlapped

    server = RelayServer(path, {"first": first, "second": second.set})
    one, two = (RelayClient(path, timeout_s=LIMIT_S) for _ in range(2))
    overlapped = pool.submit(one.call, "first")
    assert entered.wait(LIMIT_S)
    waiting = pool.submit(two.call, "second")
    sent.set()
    assert overlapped.result(LIMIT_S) is False
    waiting.result(LIMIT_S)
    assert second.is_set()
    for end in (one, two, server):
        end.close()


def test_client_that_leaves_during_its_call_harms_nobody(connect, methods, pool):
    leaver, other = connect(), connect()
    leaver._socket.sendall(b'{"method": "block", "args": []}\n')
    assert methods.entered.wait(LIMIT_S)
    leaver.close()
    waiting = pool.submit(other.call, "echo", 1)
    methods.leave.set()
    assert waiting.result(LIMIT_S) == [1]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM])
def test_failing_to_accept_does_not_end_the_server(path, monkeypatch, code):
    """A stand-in for a host without files to spare, which would fail the test as well."""
    accept, failures = socket.socket.accept, iter([code] * 3)

    def failing(listener):
        if (failure := next(failures, None)) is not None:
            raise OSError(failure, os.strerror(failure))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    server = RelayServer(path, {"one": lambda: 1})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.call("one") == 1
    assert next(failures, None) is None
    client.close()
    server.close()
    assert not server._thread.is_alive()


# -- the socket, and closing ---------------------------------------------------------------------


def test_only_the_owner_may_connect(path, monkeypatch):
    before = os.umask(0)
    try:
        server = RelayServer(path, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()


@pytest.mark.parametrize("kind", [str, Path])
def test_path_is_a_text_or_a_path(path, kind):
    server = RelayServer(kind(path), {"one": lambda: 1})
    client = RelayClient(kind(path), timeout_s=LIMIT_S)
    assert client.call("one") == 1
    client.close()
    server.close()
    assert not path.exists()


@pytest.mark.parametrize("end", [lambda path: RelayServer(path, {}), RelayClient])
def test_path_that_is_too_long(end):
    path = "/tmp/" + "\u00e9" * 52  # of two bytes each
    with pytest.raises(InvalidInfo) as caught:
        end(path)
    assert str(caught.value) == (
        f"The path of the socket is too long: {path}. Where: path. Expected: at most 107 bytes. "
        "Got: 109 bytes. Cure: put the socket into a folder with a shorter name, for example one "
        "in /tmp."
    )


def test_longest_path(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path = folder / ("x" * (107 - len(str(folder)) - 1))
    server = RelayServer(path, {"one": lambda: 1})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.call("one") == 1
    client.close()
    server.close()
    folder.rmdir()


def test_folder_that_is_missing(tmp_path):
    files = _open_files()
    with pytest.raises(InvalidInfo) as caught:
        RelayServer(tmp_path / "none" / "s", {})
    assert str(caught.value) == (
        f"There is no folder for the socket {tmp_path}/none/s. Where: path. "
        f"Expected: a folder that exists. Got: {tmp_path}/none. Cure: make the folder first."
    )
    assert _open_files() == files


def test_folder_that_cannot_be_written(monkeypatch, path):
    def refused(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "chmod", refused)  # for the tests of a superuser
    files = _open_files()
    with pytest.raises(InvalidInfo) as caught:
        RelayServer(path, {})
    assert str(caught.value) == (
        f"There can be no socket at {path}: [Errno 13] Permission denied. Where: path. "
        "Cure: choose a folder that this process may write to."
    )
    assert _open_files() == files, caught


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_path_of_another_file(path, kind):
    make = {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("nowhere")}
    make[kind]()
    with pytest.raises(InvalidInfo) as caught:
        RelayServer(path, {})
    assert str(caught.value) == (
        f"{path} is there already, and is no socket. Where: path. "
        "Expected: a path where there is nothing, or the socket of a dead server. "
        "Got: another file. Cure: choose another path."
    )
    assert os.path.lexists(path)


def test_live_socket_is_not_replaced(server, connect, path):
    files = _open_files()
    with pytest.raises(InvalidInfo) as caught:
        RelayServer(path, {})
    assert str(caught.value) == (
        f"{path} is there already, and a server listens at it. Where: path. "
        "Expected: a path where there is nothing, or the socket of a dead server. "
        "Got: a socket in use. Cure: choose another path, or stop that server."
    )
    assert connect().call("echo", 1) == [1]
    assert set(files) <= set(_open_files())


def test_live_socket_whose_queue_is_full_is_not_replaced(path):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        code = 0
        while code == 0:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            code = waiting.connect_ex(str(path))
        assert code == errno.EAGAIN
        with pytest.raises(InvalidInfo, match="a server listens at it"):
            RelayServer(path, {})
    assert path.is_socket()


def test_socket_of_a_dead_server_is_replaced(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()
    server = RelayServer(path, {"one": lambda: 1})
    client = RelayClient(path, timeout_s=LIMIT_S)
    assert client.call("one") == 1
    client.close()
    server.close()


def test_client_that_does_not_read_does_not_hold_close(path, pool):
    big = "x" * (1 << 24)
    server = RelayServer(path, {"big": lambda: big})
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(str(path))
        raw.sendall(b'{"method": "big", "args": []}\n')
        assert raw.recv(1) == b"{"  # the answer is on its way
        (thread,) = server._serving
        server.close()
        assert not thread.is_alive()
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(1 << 20):
                pass


def test_close_hangs_up(server, connect, path):
    client = connect()
    client.call("echo")
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(str(path))
        raw.sendall(b'{"method": "echo", "args": []}\n')
        assert raw.recv(100) == b'{"result": []}\n'
        server.close()
        assert raw.recv(100) == b""
    with pytest.raises(PeerDead, match=r"^The engine's process has gone\b"):
        client.call("echo")
    assert not path.exists()
    with pytest.raises(PeerDead, match="No engine answers at"):
        RelayClient(path)


def test_close_lets_the_call_in_progress_end_and_begins_no_other(path, pool):
    entered, leave, began = threading.Event(), threading.Event(), threading.Event()

    def stop() -> str:
        entered.set()
        assert leave.wait(LIMIT_S)
        server.close()
        return "left"

    server = RelayServer(path, {"stop": stop, "other": began.set})
    running, queued = (RelayClient(path, timeout_s=LIMIT_S) for _ in range(2))
    call = pool.submit(running.call, "stop")
    assert entered.wait(LIMIT_S)
    queued._socket.sendall(b'{"method": "other", "args": []}\n')
    leave.set()
    assert call.result(LIMIT_S) == "left"
    with contextlib.suppress(ConnectionResetError):  # hung up on before or after it was read
        assert queued._socket.recv(1) == b""
    server.close()
    assert not began.is_set()
    for client in (running, queued):
        client.close()


def _open_files() -> list[str]:
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


def test_close_twice_leaves_no_thread_and_no_file(path):
    threads, files = set(threading.enumerate()), _open_files()
    server = RelayServer(path, {"echo": lambda: 1})
    clients = [RelayClient(path, timeout_s=LIMIT_S) for _ in range(3)]
    assert [client.call("echo") for client in clients] == [1, 1, 1]
    assert len(set(threading.enumerate()) - threads) == 4
    assert len(_open_files()) == len(files) + 7
    clients[0].close()
    for _ in range(2):
        server.close()
        for client in clients:
            client.close()
    left = set(threading.enumerate()) - threads
    for thread in left:  # that of the first client may still be on its last steps
        thread.join(5)
    assert [thread.name for thread in left if thread.is_alive()] == []
    assert _open_files() == files


def test_failed_connection_leaves_no_file(path):
    files = _open_files()
    with pytest.raises(PeerDead) as caught:
        RelayClient(path)
    assert _open_files() == files, caught  # while the error, and so the client, still lives


def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next(path, monkeypatch):
    server = RelayServer(path, {"echo": lambda value: value})
    client = RelayClient(path, timeout_s=LIMIT_S)

    def interrupted(deadline):
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.call("echo", 1)
    with pytest.raises(PeerDead):
        client.call("echo", 2)
    server.close()


def test_two_threads_get_their_own_answers(connect):
    client = connect()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: client.call("echo", n), range(400)))
    assert answers == [[n] for n in range(400)]


@pytest.mark.parametrize("path", [None, 5, b"x\0y", "x\0y", "\ud800"])
def test_what_cannot_be_a_path(path):
    with pytest.raises(InvalidInfo) as error:
        RelayClient(path)
    assert error.value.where == "path"
    assert error.value.cure


@pytest.mark.parametrize("seconds", [None, "x", -1, 0, True, float("nan"), float("inf"), 10**400])
def test_what_cannot_be_a_timeout(tmp_path, seconds):
    with pytest.raises(InvalidInfo, match="'timeout_s' has a wrong value") as error:
        RelayClient(tmp_path / "x.sock", timeout_s=seconds)
    assert error.value.expected == "seconds, more than 0"
