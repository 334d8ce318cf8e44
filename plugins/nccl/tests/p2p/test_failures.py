"""Peers that die, stall, revoke or talk nonsense: a typed error, and nothing written afterwards."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import struct
import threading
from typing import Any

import pytest
import torch

from vllm_wt.errors import (
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Revoked,
    Timeout,
    TransportError,
    WrongOrder,
)
from vllm_wt.transport import Copy

MIB = 1 << 20
NBYTES = 192 * MIB


def half_way(bench: Any, here: Any, owner: Any) -> tuple[torch.Tensor, Any]:
    """A read of which some bytes have landed, and not all."""
    here.open("owner", 1, owner.expose(NBYTES), bench.deadline())
    target, region = bench.arena(here, NBYTES)
    running = here.submit(here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))

    def begun() -> bool:
        progress = here.poll(running)
        assert not progress.done
        return bool(progress.nbytes)

    bench.until(begun)
    return target, running


def poll_to_the_end(bench: Any, here: Any, running: Any) -> None:
    bench.until(lambda: here.poll(running).done)


def test_an_owner_killed_during_a_read_is_peer_dead(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    target, running = half_way(bench, here, owner)
    owner.kill()
    with pytest.raises(PeerDead) as caught:
        poll_to_the_end(bench, here, running)
    assert caught.value.backend == "nccl_p2p"
    assert caught.value.cure
    with pytest.raises(WrongOrder):
        here.poll(running)
    assert here.cancel(running)
    target.zero_()
    with pytest.raises(PeerDead):
        here.submit(running.plan)
    with pytest.raises(PeerDead):
        here.notify("owner", 1)
    assert not target.any()


def test_an_owner_whose_child_lives_on_is_peer_dead(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    _, running = half_way(bench, here, owner)
    child = owner.ask("fork")
    try:
        owner.kill()
        with pytest.raises(PeerDead):
            poll_to_the_end(bench, here, running)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_dead_owner_cannot_be_opened_and_a_living_one_can_afterwards(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(100)
    owner.kill()
    with pytest.raises(PeerDead):
        here.open("owner", 1, handle, bench.deadline())
    here.open("owner", 1, bench.process().expose(100), bench.deadline())


def test_an_owner_that_does_not_poll_is_a_timeout_at_open(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(100)
    owner.ask("poll", on=False)
    with pytest.raises(Timeout) as caught:
        here.open("owner", 1, handle, bench.deadline(0.3))
    assert (caught.value.where, caught.value.backend) == ("open", "nccl_p2p")
    owner.ask("poll", on=True)
    here.open("owner", 1, handle, bench.deadline())


def test_an_owner_that_stops_has_only_been_slow(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    target, running = half_way(bench, here, owner)
    owner.stop()
    while here.poll(running).nbytes > (before := here.poll(running).nbytes):
        assert before < NBYTES
    assert not here.poll(running).done
    owner.go_on()
    poll_to_the_end(bench, here, running)
    assert torch.equal(target, bench.content(NBYTES, 0))


def test_nothing_is_written_after_a_cancel_and_the_plan_is_read_again(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    target, running = half_way(bench, here, owner)
    owner.stop()
    assert here.cancel(running)
    with pytest.raises(WrongOrder):
        here.poll(running)
    target.zero_()
    again = here.submit(running.plan)
    assert here.poll(again).nbytes == 0
    assert here.cancel(again)
    owner.go_on()
    owner.ask("refill", generation=1, seed=7)
    first = running._parts[0]
    again = here.submit(running.plan)
    while not (progress := here.poll(again)).done:
        assert progress.nbytes > 0 or not target.any(), "what was given up has been written"
    assert torch.equal(target, bench.content(NBYTES, 7))
    assert first.announced < len(first.share), "what was given up has been sent to its end"


def test_nothing_is_written_after_a_close(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    target, _ = half_way(bench, here, owner)
    here.close()
    target.zero_()
    fresh = bench.reader()
    fresh.open("owner", 2, owner.expose(100, generation=2), bench.deadline())
    assert not target.any()
    with pytest.raises(TransportError):
        here.register([target])


def test_a_generation_that_is_revoked_during_a_read_is_revoked(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    _, running = half_way(bench, here, owner)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        poll_to_the_end(bench, here, running)
    with pytest.raises(Revoked):
        poll_to_the_end(bench, here, here.submit(running.plan))


def test_memory_can_be_freed_while_a_reader_takes_nothing(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    _, running = half_way(bench, here, owner)
    owner.ask("free", generation=1)  # meanwhile this reader takes nothing
    with pytest.raises(Revoked):
        poll_to_the_end(bench, here, running)
    fresh = bench.reader()
    fresh.open("owner", 2, owner.expose(100, generation=2), bench.deadline())


@pytest.mark.parametrize("is_prepared", [False, True])
def test_memory_that_is_freed_while_it_can_be_read_ends_the_pass_and_not_the_owner(
    bench: Any, is_prepared: bool
) -> None:
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(1000, 2 * MIB), bench.deadline())
    target, region = bench.arena(here, 2 * MIB)
    plan = here.prepare(
        region, [Copy("owner", 0, 0, 0, 0, 1000), Copy("owner", 1, 0, 0, 1000, MIB)]
    )
    if is_prepared:
        bench.pass_over(here, plan)
    owner.ask("lose", generation=1)
    target.zero_()
    with pytest.raises(Revoked):
        bench.pass_over(here, plan)
    assert not target.any()
    bench.reader().open("owner", 2, owner.expose(100, generation=2), bench.deadline())


def test_a_revoked_generation_cannot_be_opened(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(100)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        here.open("owner", 1, handle, bench.deadline())


def test_a_handle_is_refused_before_anybody_is_connected_to(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    good = owner.expose(100)
    named = json.loads(good) | {"ways": [["localhost", 1]]}
    for cls, name, generation, handle in (
        (CorruptTransfer, "owner", 1, good[:-1]),
        (InvalidInfo, "owner", 1, json.dumps(named).encode()),
        (InvalidInfo, "owner", 1, json.dumps(json.loads(good) | {"protocol": 2}).encode()),
        (InvalidInfo, "other", 1, good),
        (InvalidInfo, "owner", 2, good),
    ):
        with pytest.raises(cls):
            here.open(name, generation, handle, bench.deadline())
    assert owner.ask("reported", ticket=1)["garbage"] == 0
    here.open("owner", 1, good, bench.deadline())


def test_a_reader_with_a_wrong_secret_is_turned_away(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = json.loads(owner.expose(100)) | {"secret": secrets.token_hex(32)}
    with pytest.raises(PeerDead):
        here.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    assert owner.ask("reported", ticket=1)["garbage"] == 1


def test_another_process_at_the_owners_port_is_not_taken_for_it(bench: Any) -> None:
    """It greets whoever comes, and has not the secret."""
    owner, here = bench.process(), bench.reader()
    handle = json.loads(owner.expose(100))
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        handle["ways"] = [["127.0.0.1", impostor.getsockname()[1]]]
        with pytest.raises(Timeout):  # it says nothing so far
            here.open("owner", 1, json.dumps(handle).encode(), bench.deadline(0.1))
        impostor.accept()[0].close()
        handle_bytes = json.dumps(handle).encode()

        def greet() -> None:
            with impostor.accept()[0] as connection:
                challenge = bytes(16)
                welcome = b"\x01" + bytes(32)
                for kind, body in ((1, challenge), (3, welcome)):
                    connection.sendall(struct.pack("!IB", len(body), kind) + body)
                while connection.recv(1 << 16):
                    pass

        greeting = threading.Thread(target=greet)
        greeting.start()
        with pytest.raises(CorruptTransfer):
            here.open("owner", 1, handle_bytes, bench.deadline())
        greeting.join()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        secrets.token_bytes(100_000),
        struct.pack("!IB", 1 << 31, 2),
        struct.pack("!IB", 8, 12) + bytes(8),
        struct.pack("!IB", 65, 2) + bytes(65),
    ],
    ids=["http", "zeros", "random", "huge", "a report", "a hello"],
)
def test_a_strangers_words_are_dropped(bench: Any, said: bytes) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(1000)
    here.open("owner", 1, handle, bench.deadline())
    for address, port in json.loads(handle)["ways"]:
        with socket.create_connection((address, port)) as stranger:
            stranger.settimeout(30)
            stranger.sendall(said)
            bench.until(lambda peer=stranger: _has_hung_up(peer))
    seen = owner.ask("reported", ticket=0)
    assert seen == {"readers": [], "garbage": len(json.loads(handle)["ways"])}
    target, region = bench.arena(here, 1000)
    bench.pass_over(here, here.prepare(region, [Copy("owner", 0, 0, 0, 0, 1000)]))
    assert torch.equal(target, bench.content(1000, 0))


def test_silent_strangers_keep_nobody_out(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(1000)
    way = tuple(json.loads(handle)["ways"][0])
    strangers = [socket.create_connection(way) for _ in range(200)]
    try:
        here.open("owner", 1, handle, bench.deadline())
        bench.until(lambda: _has_hung_up(strangers[0]))
    finally:
        for stranger in strangers:
            stranger.close()


def _has_hung_up(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1 << 16)  # its challenge comes first
    except ConnectionError:
        return True


def test_readers_that_die_or_stop_keep_nobody_else_waiting(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(NBYTES)
    for name in ("dying", "stopping"):
        other = bench.process(name)
        other.ask("open", owner="owner", handle=handle.decode(), nbytes=NBYTES)
        assert other.ask("begin", until=1) < NBYTES
        if name == "dying":
            other.kill()
        else:
            other.stop()
    here.open("owner", 1, handle, bench.deadline())
    target, region = bench.arena(here, NBYTES)
    bench.pass_over(here, here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))
    assert torch.equal(target, bench.content(NBYTES, 0))
    owner.ask("free", generation=1)
