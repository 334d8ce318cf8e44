"""Where trainer and workers meet: every call is bounded, and what cannot be reached is named."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import Aborted, CorruptTransfer, InvalidInfo, PeerDead, Timeout, TransportError
from vllm_wt_nccl import meeting, native_meeting, rendezvous
from vllm_wt_nccl.info import Call
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.meeting import Watch, decoded, error_in, made, numbers, tell
from vllm_wt_nccl.native_meeting import made_together
from vllm_wt_nccl.native_members import Member
from vllm_wt_nccl.rendezvous import Rendezvous, awaited, local_address

HOST = "127.0.0.1"
Make = Callable[[], Any]


def _hosted() -> Rendezvous:
    return Rendezvous.host("session", HOST, 0, Deadline(30))


def _joined(port: int, seconds: float = 30) -> Rendezvous:
    return Rendezvous.join("session", HOST, port, Deadline(seconds))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "192.0.2.7", "no-such-host.invalid"])
def test_an_address_that_workers_cannot_reach_is_refused(address: str) -> None:
    with pytest.raises(InvalidInfo) as caught:
        Rendezvous.host("session", address, 0, Deadline(30))
    assert address in str(caught.value)


def test_a_port_that_is_taken_is_refused() -> None:
    first = _hosted()
    with pytest.raises(InvalidInfo, match=f"port {first.port}"):
        Rendezvous.host("session", HOST, first.port, Deadline(30))


@pytest.mark.parametrize("address", ["::1", "[::1]", "localhost"])
def test_addresses_of_each_form(address: str) -> None:
    host = Rendezvous.host("session", address, 0, Deadline(30))
    worker = Rendezvous.join("session", address, host.port, Deadline(30))
    worker.put("key", "value", Deadline(30))
    assert host.get("key", Deadline(30), "it is missing") == b"value"
    assert local_address(address) in {"::1", "127.0.0.1"}


def test_it_listens_on_its_own_address_alone() -> None:
    host = _hosted()
    with pytest.raises(PeerDead):
        Rendezvous.join("session", "127.0.0.2", host.port, Deadline(30))


def test_a_port_that_is_free_by_now() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PeerDead, match=f"port {port}"):
        _joined(port)


def test_one_that_does_not_answer() -> None:
    with socket.create_server((HOST, 0)) as server, pytest.raises(Timeout):
        _joined(server.getsockname()[1], seconds=0.5)


def test_one_that_ends_while_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store would try until the deadline."""
    host = _hosted()
    port = host.port
    connect = rendezvous._store

    def ended_before(*args: Any) -> Any:
        host.close()
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) != 0:
                    return connect(*args)

    monkeypatch.setattr(rendezvous, "_store", ended_before)
    with pytest.raises(PeerDead, match=f"port {port}"):
        _joined(port)


def test_another_session_at_the_same_port() -> None:
    host = _hosted()
    with pytest.raises(PeerDead, match="Another trainer"):
        Rendezvous.join("of before", HOST, host.port, Deadline(30))


def test_no_way_to_a_name_that_is_none() -> None:
    with pytest.raises(TransportError, match=r"no-such-host\.invalid"):
        local_address("no-such-host.invalid")


def test_sessions_do_not_meet() -> None:
    host = _hosted()
    host.put("key", "one", Deadline(30))
    store = host.apart("group", Deadline(30))
    assert not store.check(["key"])


def test_a_key_is_waited_for(peer: Make) -> None:
    host = _hosted()
    worker = peer()
    worker.call("join", host.port)
    looks = []

    def put_late() -> None:
        looks.append(None)
        if len(looks) == 3:
            worker.begin("put", "key", "late")

    assert host.get("key", Deadline(30), "it is missing", put_late) == b"late"
    assert len(looks) >= 3


def test_a_key_that_does_not_come() -> None:
    with pytest.raises(Timeout, match="it is missing"):
        _hosted().get("key", Deadline(0.2), "it is missing")


def test_a_number_is_waited_for() -> None:
    host = _hosted()
    worker = _joined(host.port)
    count = host.reached("count", 3, Deadline(30), "it is low", lambda: _count(worker))
    assert count == 3


def _count(worker: Rendezvous) -> None:
    worker.add("count", 1, Deadline(30))


def test_a_number_that_is_not_reached() -> None:
    with pytest.raises(Timeout, match=r"it is low.*Got: 0 of 3\."):
        _hosted().reached("count", 3, Deadline(0.2), "it is low", got=lambda count: f"{count} of 3")


@pytest.mark.parametrize("wait", ["get", "reached", "watch", "made"])
def test_what_is_waited_for_is_said_whichever_question_meets_the_deadline(
    wait: str, peer: Make
) -> None:
    trainer = peer()
    worker = _joined(trainer.call("host"))
    deadline = Deadline(1)

    def watch() -> None:
        trainer.stop()
        worker.has("failed", deadline)

    waits: dict[str, Callable[[], Any]] = {
        "get": lambda: worker.get("key", deadline, "it is missing"),
        "reached": lambda: worker.reached("count", 1, deadline, "it is missing"),
        "watch": lambda: worker.get("key", deadline, "it is missing", watch),
        "made": lambda: awaited(Future(), deadline, "it is missing", where="here", watch=watch),
    }
    if wait in {"get", "reached"}:
        trainer.stop()
    with pytest.raises(Timeout, match="it is missing"):
        waits[wait]()


def test_a_wait_is_given_up() -> None:
    deadline = Deadline(60)
    with pytest.raises(Aborted, match="no longer wanted"):
        _hosted().get("key", deadline, "it is missing", lambda: deadline.cancel("no longer wanted"))


def test_a_trainer_that_is_killed(peer: Make) -> None:
    trainer = peer()
    worker = _joined(trainer.call("host"))
    trainer.kill()
    with pytest.raises(PeerDead):
        worker.get("key", Deadline(30), "it is missing")


def test_a_trainer_that_is_stopped_and_goes_on(peer: Make) -> None:
    trainer = peer()
    worker = _joined(trainer.call("host"))
    trainer.stop()
    with pytest.raises(Timeout):
        worker.add("count", 1, Deadline(0.3))
    deadline = Deadline(60)
    threading.Timer(0.2, deadline.cancel, ["no longer wanted"]).start()
    with pytest.raises(Aborted):
        worker.add("count", 1, deadline)
    trainer.go_on()
    assert worker.add("other", 1, Deadline(30)) == 1


def test_a_failure_is_told() -> None:
    host, keys = _hosted(), Keys(7)
    worker = _joined(host.port)
    watch = Watch(host, keys, Deadline(30))
    watch()
    tell(worker, keys, CorruptTransfer("It is not what it was", cure="push again"))
    with pytest.raises(CorruptTransfer, match="It is not what it was"):
        _look_until_it_raises(watch)


def _look_until_it_raises(watch: Watch) -> None:
    while True:
        watch()


def test_what_is_left_is_validated() -> None:
    assert decoded(b'{"a": 1}', "a call") == {"a": 1}
    assert numbers(b"3 1 2 ") == [1, 2, 3]
    for said in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(CorruptTransfer, match="a call"):
            decoded(said, "a call")
    for said in (b'{"what": "x", "ranks": {"a": 1}}', b'{"ranks": {"1": ' + b"[" * 100_000):
        with pytest.raises(CorruptTransfer, match="an error"):
            error_in(said)
    for said in (b"one", b"\xff"):
        with pytest.raises(CorruptTransfer):
            numbers(said)


class _Late:
    """A communicator that comes when nobody waits for it any more."""

    def __init__(self) -> None:
        self.may_come = threading.Event()
        self.closed = threading.Event()

    def opened(self, *args: Any) -> _Late:
        assert self.may_come.wait(30)
        return self

    def close(self) -> bool:
        self.closed.set()
        return True


def _made(host: Rendezvous, deadline: Deadline) -> None:
    made(host, Call(group=1, members=(1,)), 0, HOST, torch.device("cpu"), deadline)


def _made_together(host: Rendezvous, deadline: Deadline) -> None:
    trainer = Member(rank=0, world_size=2, first=0, workers=1, device="any")
    made_together(host, trainer, 0, HOST, torch.device("cpu"), deadline)


@pytest.mark.parametrize("make", [_made, _made_together])
def test_a_communicator_that_is_given_up_while_it_is_made(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Rendezvous, Deadline], None]
) -> None:
    """It is closed when it comes: nothing of it is left."""
    late = _Late()
    for module in (meeting, native_meeting):
        monkeypatch.setattr(module, "opened", late.opened)
    with pytest.raises(Timeout, match="communicator"):
        make(_hosted(), Deadline(0.2))
    assert not late.closed.is_set()
    late.may_come.set()
    assert late.closed.wait(30)
