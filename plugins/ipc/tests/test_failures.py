"""Peers that die, stop, revoke or are strangers: a typed error, and nothing written afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_wt.errors import PeerDead, Revoked, Timeout, TransportError, WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_ipc import batching, serving
from vllm_wt_ipc.messages import MOST_BYTES, Hello

NBYTES = 10_000


def half_way(bench: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    """A pass of which some bytes have landed, and not all."""
    monkeypatch.setattr(batching, "PART_BYTES", NBYTES // 10)
    target, region = bench.arena(reader, NBYTES)
    running = reader.submit(reader.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))
    assert 0 < reader.poll(running).nbytes < NBYTES
    return target, running


def poll_to_the_end(reader: Any, running: Any) -> None:
    while not reader.poll(running).done:
        pass


def socket_of(handle: bytes) -> str:
    return "\0" + json.loads(handle)["address"]


def stranger(handle: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect(socket_of(handle))
    return connection


# -- revoking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["revoke", "drop"])
def test_what_was_revoked_cannot_be_opened(bench: Any, how: str) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.ask(how, generation=1)
    with pytest.raises(Revoked):
        reader.open("owner", 1, handle, bench.deadline())
    reader.open("owner", 2, owner.expose(100, generation=2), bench.deadline())


@pytest.mark.parametrize("how", ["revoke", "drop"])
def test_what_was_revoked_cannot_be_read(bench: Any, how: str) -> None:
    owner, reader = bench.opened(100)
    target, region = bench.arena(reader, 100)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
    owner.ask(how, generation=1)
    with pytest.raises(Revoked) as caught:
        reader.submit(plan)
    assert caught.value.backend == "ipc"
    assert caught.value.cure
    with pytest.raises(Revoked):
        reader.check("owner")
    assert not target.any()


def test_what_is_revoked_during_a_pass_fails_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = bench.opened(NBYTES)
    _, running = half_way(bench, reader, monkeypatch)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        poll_to_the_end(reader, running)
    with pytest.raises(WeightTransferError):
        reader.poll(running)
    assert reader.cancel(running)


def test_what_is_revoked_after_a_pass_was_read(bench: Any) -> None:
    owner, reader = bench.opened(100)
    target, region = bench.arena(reader, 100)
    done = bench.pass_over(reader, reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)]))
    owner.ask("revoke", generation=1)
    assert reader.poll(done).done
    assert torch.equal(target, bench.content(100, 0))


def test_a_slot_that_is_used_again_is_another_generations(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    first = owner.expose(100)
    reader.open("owner", 1, first, bench.deadline())
    owner.ask("revoke", generation=1)
    second = owner.expose(100, generation=2)
    assert json.loads(first)["slot"] == json.loads(second)["slot"]
    with pytest.raises(Revoked):
        reader.check("owner")


def test_revoking_one_generation_leaves_the_others(bench: Any) -> None:
    owner, one, two = bench.owner(), bench.reader(), bench.reader()
    for generation, reader in ((1, one), (2, two)):
        handle = owner.expose(100, generation=generation, seed=generation)
        reader.open("owner", generation, handle, bench.deadline())
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        one.check("owner")
    two.check("owner")
    assert torch.equal(two.map("owner")[0], bench.content(100, 2))


def test_a_generation_names_one_region_and_is_not_used_again(bench: Any) -> None:
    here = bench.reader("here")
    regions = [here.register([here.allocate(10, torch.device("cpu"))]) for _ in range(2)]
    handle = here.expose(regions[0], 1)
    assert here.expose(regions[0], 1) == handle
    with pytest.raises(TransportError):
        here.expose(regions[1], 1)
    here.revoke(1)
    here.revoke(1)
    here.revoke(99)
    with pytest.raises(Revoked):
        here.expose(regions[0], 1)
    here.expose(regions[1], 2)


# -- the owner dies, closes or stops -------------------------------------------------------------


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_dead_owner_is_noticed(bench: Any, how: str, forked: bool) -> None:
    owner, reader = bench.opened(100)
    child = owner.ask("fork") if forked else 0
    try:
        target, region = bench.arena(reader, 100)
        plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
        mapped = reader.map("owner")
        owner.kill() if how == "kill" else owner.ask("close")
        with pytest.raises(PeerDead):
            reader.check("owner")
        with pytest.raises(PeerDead) as caught:
            reader.submit(plan)
        assert caught.value.cure
        assert not target.any()
        assert torch.equal(mapped[0], bench.content(100, 0))
        if not forked:
            with pytest.raises(PeerDead):
                reader.notify("owner", 1)
        reader.close()
        assert torch.equal(mapped[0], bench.content(100, 0))
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_fork_that_closes_takes_nothing_from_its_parent(bench: Any) -> None:
    owner, reader = bench.opened(100)
    assert owner.ask("close_in_a_fork") == "closed"
    reader.check("owner")
    target, region = bench.arena(reader, 100)
    operation = reader.submit(reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)]))
    poll_to_the_end(reader, operation)
    assert torch.equal(target, bench.content(100, 0))
    bench.reader().open("owner", 2, owner.expose(100, generation=2), bench.deadline())


def test_an_owner_killed_during_a_pass_is_peer_dead(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = bench.opened(NBYTES)
    target, running = half_way(bench, reader, monkeypatch)
    owner.kill()
    with pytest.raises(PeerDead):
        poll_to_the_end(reader, running)
    assert reader.cancel(running)
    target.zero_()
    with pytest.raises(WeightTransferError):
        reader.poll(running)
    assert not target.any()
    again = bench.owner()
    reader.close()
    fresh = bench.reader()
    fresh.open("owner", 1, again.expose(100), bench.deadline())


@pytest.mark.parametrize("how", ["kill", "close", "hang_up"])
def test_an_owner_that_is_gone_cannot_be_opened(bench: Any, how: str) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.ask("close") if how == "close" else getattr(owner, how)()
    with pytest.raises(PeerDead):
        reader.open("owner", 1, handle, bench.deadline())


@pytest.mark.parametrize("how", ["stopped", "does not poll"])
def test_an_owner_that_does_not_answer_is_a_timeout(bench: Any, how: str) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.signal(signal.SIGSTOP) if how == "stopped" else owner.ask("poll", on=False)
    with pytest.raises(Timeout) as caught:
        reader.open("owner", 1, handle, bench.deadline(0.2))
    assert caught.value.where == "open"
    owner.signal(signal.SIGCONT) if how == "stopped" else owner.ask("poll", on=True)
    reader.open("owner", 1, handle, bench.deadline())


def test_an_owner_killed_while_it_is_opened_is_peer_dead(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.signal(signal.SIGSTOP)
    killing = bench.deadline()
    wait = killing.wait

    def kill_then_wait(seconds: float) -> None:
        if owner.pid:
            owner.kill()
        wait(seconds)

    killing.wait = kill_then_wait
    with pytest.raises(PeerDead):
        reader.open("owner", 1, handle, killing)


def test_reports_to_a_stopped_owner_end_in_a_typed_error(bench: Any) -> None:
    owner, reader = bench.opened(100)
    owner.signal(signal.SIGSTOP)

    def report_without_end() -> None:
        for ticket in range(1, 1_000_000):
            reader.notify("owner", ticket)

    with pytest.raises(Timeout):
        report_without_end()
    owner.signal(signal.SIGCONT)


# -- readers and strangers -----------------------------------------------------------------------


def test_readers_that_end_leave_the_owner_to_the_others(bench: Any) -> None:
    owner = bench.owner()
    handle = owner.expose(100)
    readers = [bench.reader() for _ in range(5)]
    for reader in readers:
        reader.open("owner", 1, handle, bench.deadline())
    for reader in readers[1:]:
        reader.close()
    bench.until(lambda: owner.ask("connections") == 1)
    readers[0].check("owner")
    readers[0].notify("owner", 3)
    bench.until(lambda: owner.ask("reported", ticket=3) == [readers[0].name])


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(MOST_BYTES),
        bytes(10_000),
        Hello(bytes(16), 1, "reader").pack(),
    ],
    ids=["short", "http", "zeros", "long", "wrong nonce"],
)
def test_garbage_is_dropped_at_once(bench: Any, packet: bytes) -> None:
    owner, reader = bench.opened(100)
    handle = owner.expose(100, generation=2)
    with stranger(handle) as connection:
        connection.send(packet)
        assert connection.recv(1) == b""
    assert owner.ask("connections") == 1
    reader.check("owner")
    bench.reader().open("owner", 2, handle, bench.deadline())


@pytest.mark.parametrize("name", ["a b", "", "\u00fc"])
def test_a_name_out_of_the_contract_is_garbage(bench: Any, name: str) -> None:
    owner = bench.owner()
    handle = owner.expose(100)
    nonce = bytes.fromhex(json.loads(handle)["nonce"])
    with stranger(handle) as connection:
        connection.send(Hello(nonce, 1, name).pack())
        assert connection.recv(1) == b""


def test_a_reader_that_talks_nonsense_is_dropped(bench: Any) -> None:
    owner, reader, other = bench.owner(), bench.reader(), bench.reader()
    handle = owner.expose(100)
    for each in (reader, other):
        each.open("owner", 1, handle, bench.deadline())
    other._opened["owner"]._socket.send(b"nonsense, and no report")
    bench.until(lambda: owner.ask("connections") == 1)
    with pytest.raises(PeerDead):
        other.check("owner")
    reader.check("owner")


def test_idle_strangers_keep_nobody_out(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    reader.open("owner", 1, handle, bench.deadline())
    strangers = []
    for _ in range(3 * serving._MOST_STRANGERS):
        strangers.append(stranger(handle))
        if len(strangers) % 50 == 0:
            owner.ask("connections")
    bench.reader().open("owner", 1, handle, bench.deadline())
    reader.check("owner")
    bench.until(lambda: owner.ask("connections") == serving._MOST_STRANGERS + 2)
    for each in strangers:
        each.close()
    bench.until(lambda: owner.ask("connections") == 2)


def test_strangers_that_say_nothing_are_dropped_after_a_while(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bench.reader("here")
    region = here.register([here.allocate(10, torch.device("cpu"))])
    handle = here.expose(region, 1)
    with stranger(handle) as connection:
        here.progress()
        assert len(here._server._guests) == 1
        monkeypatch.setattr(serving, "_SILENT_S", 0.0)
        here.progress()
        assert connection.recv(1) == b""
    assert here._server._guests == []


def test_descriptors_that_a_stranger_sends_are_not_taken(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_SILENT_S", 600.0)
    here = bench.reader("here")
    handle = here.expose(here.register([here.allocate(10, torch.device("cpu"))]), 1)
    with stranger(handle) as connection:
        here.progress()
        before = bench.held()["files"]
        socket.send_fds(connection, [b"x"], [0, 1, 2])
        here.progress()
        assert bench.held()["files"] == before - 1


# -- closed --------------------------------------------------------------------------------------


def test_a_closed_transport_says_so(bench: Any) -> None:
    _, reader = bench.opened(10)
    _, region = bench.arena(reader, 10)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 10)])
    running = reader.submit(plan)
    reader.close()
    reader.close()
    uses: list[Callable[[], object]] = [
        lambda: reader.register([torch.zeros(1, dtype=torch.uint8)]),
        lambda: reader.unregister(region),
        lambda: reader.expose(region, 1),
        lambda: reader.revoke(1),
        reader.progress,
        lambda: reader.listen(0.0),
        lambda: reader.readers(1),
        lambda: reader.open("owner", 1, b"", bench.deadline()),
        lambda: reader.prepare(region, []),
        lambda: reader.submit(plan),
        lambda: reader.poll(running),
        lambda: reader.notify("owner", 1),
        lambda: reader.map("owner"),
        lambda: reader.check("owner"),
    ]
    for use in uses:
        with pytest.raises(TransportError):
            use()
    assert reader.cancel(running)


def test_open_and_close_leave_nothing(bench: Any) -> None:
    owner = bench.owner()
    handle = owner.expose(100, 100)
    owner.ask("revoke", generation=1)
    good = owner.expose(100, 100, generation=2)

    def use() -> None:
        reader = bench.reader("reader")
        with pytest.raises(Revoked):
            reader.open("owner", 1, handle, bench.deadline())
        reader.open("owner", 2, good, bench.deadline())
        reader.close()

    use()
    before = bench.held()
    for _ in range(20):
        use()
    after = bench.held()
    assert after["files"] == before["files"]
    assert after["maps"] <= before["maps"] + 2
    bench.until(lambda: owner.ask("connections") == 0)
