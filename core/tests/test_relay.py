"""Calls across a local socket, between threads of this process and to another one."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_wt.clients.relay import ENGINE_METHODS, RelayClient, RelayServer, engine_methods
from vllm_wt.errors import (
    CorruptTransfer,
    EngineError,
    InvalidInfo,
    PeerDead,
    StaleRound,
    Timeout,
    TornModel,
)

SCRIPT = Path(__file__).parent / "support" / "relay_process.py"
LIMIT_S = 60


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
    client.close()
    server.close()
    assert calls == [
        ("init", {"a": 1}),
        ("start",),
        ("update", {"b": 2}),
        ("finish", "v7"),
        ("finish", None),
    ]


def test_engine_without_world_size():
    class Engine:
        def start_weight_update(self): ...

    assert list(engine_methods(Engine())) == ["start_weight_update"]


# -- errors of the methods -----------------------------------------------------------------------


def test_unknown_method_names_what_there_is(connect):
    client = connect()
    with pytest.raises(InvalidInfo) as caught:
        client.call("reboot", 1)
    assert str(caught.value) == (
        "The relay has no method 'reboot'. Where: method. "
        "Expected: one of ['a_set', 'block', 'echo', 'fail']. Got: reboot."
    )
    assert client.call("echo", 1) == [1]


@pytest.mark.parametrize("cls", [TornModel, StaleRound, PeerDead, Timeout, InvalidInfo])
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
        f"No engine answers at {path}: [Errno 2] No such file or directory. "
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
            assert f"Got: {line + bytes([10])!r}." in said
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


@pytest.mark.parametrize("answer", [b"garbage", b"[1]", b"{}", b'{"error": 1}', b"\xff"])
def test_answer_of_another_form(raw_server, path, answer):
    raw_server(answer + b"\n")
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(CorruptTransfer) as caught:
        client.call("echo")
    assert caught.value.where == "echo"
    assert caught.value.expected == '{"result": ...} or {"error": text}'
    assert caught.value.got == repr(answer + b"\n")
    with pytest.raises(PeerDead, match=r"Where: again\."):
        client.call("again")


def test_half_an_answer(raw_server, path):
    raw_server(b'{"result": 1}')
    client = RelayClient(path, timeout_s=LIMIT_S)
    with pytest.raises(PeerDead, match=r"^The engine's process has gone\. Where: echo\.$"):
        client.call("echo")
    client.close()


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


# -- the socket, and closing ---------------------------------------------------------------------


def test_only_the_owner_may_connect(path, monkeypatch):
    before = os.umask(0)
    try:
        server = RelayServer(path, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()


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
        assert queued._lines.readline() == b""
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

    class Interrupted:
        def __init__(self, lines):
            self._lines = lines

        def readline(self, size):
            raise KeyboardInterrupt

        def close(self):
            self._lines.close()

    monkeypatch.setattr(client, "_lines", Interrupted(client._lines))
    with pytest.raises(KeyboardInterrupt):
        client.call("echo", 1)
    with pytest.raises(PeerDead):
        client.call("echo", 2)
    server.close()
