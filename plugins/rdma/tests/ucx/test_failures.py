"""Peers that die, stall, revoke or talk nonsense: a typed error, and nothing written afterwards."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    WeightTransferError,
)
from vllm_wt.transport import Copy
from vllm_wt_rdma.ucx import messages, reader
from vllm_wt_rdma.ucx.fabric import Fabric

MIB = 1 << 20
NBYTES = 256 * MIB


@pytest.fixture(params=["tcp", "all"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", request.param)


def half_way(bench: Any, here: Any, owner: Any) -> tuple[torch.Tensor, Any]:
    """A read of which some bytes have landed, and not all."""
    here.open("owner", 1, owner.expose(NBYTES), bench.deadline())
    target, region = bench.arena(here, NBYTES)
    running = here.submit(here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))

    def begun() -> bool:
        progress = here.poll(running)
        assert not progress.done
        return bool(target[:64].any())

    bench.until(begun)
    return target, running


def poll_to_the_end(bench: Any, here: Any, running: Any) -> None:
    bench.until(lambda: here.poll(running).done)


@pytest.mark.usefixtures("transports")
def test_an_owner_killed_during_a_read_is_peer_dead(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    target, running = half_way(bench, here, owner)
    owner.kill()
    with pytest.raises(PeerDead) as caught:
        poll_to_the_end(bench, here, running)
    assert caught.value.backend == "rdma"
    assert caught.value.cure
    assert here.cancel(running)
    with pytest.raises(TransportError):
        here.register([target])
    here.close()


@pytest.mark.usefixtures("transports")
def test_a_dead_owner_cannot_be_opened_and_a_living_one_can_afterwards(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.kill()
    with pytest.raises(PeerDead):
        here.open("owner", 1, handle, bench.deadline())
    here.open("owner", 1, bench.owner().expose(100), bench.deadline())


@pytest.mark.usefixtures("transports")
def test_an_owner_that_does_not_poll_is_a_timeout_at_open(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.ask("poll", on=False)
    with pytest.raises(Timeout) as caught:
        here.open("owner", 1, handle, bench.deadline(0.3))
    assert caught.value.where == "open"
    owner.ask("poll", on=True)
    here.open("owner", 1, handle, bench.deadline())


@pytest.mark.usefixtures("transports")
def test_nothing_is_written_after_a_cancel(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    target, running = half_way(bench, here, owner)
    owner.signal(signal.SIGSTOP)
    assert here.cancel(running)
    target.zero_()
    owner.signal(signal.SIGCONT)
    owner.ask("reported", ticket=1)
    fresh = bench.reader()
    fresh.open("owner", 2, owner.expose(100, generation=2), bench.deadline())
    assert not target.any()


@pytest.mark.usefixtures("transports")
def test_a_pass_that_is_cancelled_while_its_owner_serves_spends_nothing(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_DRAIN_S", 10.0)  # so that a slow machine is no failure
    owner, here = bench.owner(), bench.reader()
    target, running = half_way(bench, here, owner)
    plan = running.plan
    assert here.cancel(running)
    target.zero_()
    bench.pass_over(here, plan)
    assert torch.equal(target, bench.content(NBYTES, 0))


def test_a_generation_that_is_revoked_during_a_read_is_revoked(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    _, running = half_way(bench, here, owner)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        poll_to_the_end(bench, here, running)


@pytest.mark.usefixtures("transports")
def test_memory_can_be_freed_while_a_reader_takes_nothing(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    _, running = half_way(bench, here, owner)
    owner.ask("free", generation=1)  # meanwhile this reader takes nothing
    with pytest.raises((PeerDead, Revoked)):
        poll_to_the_end(bench, here, running)
    fresh = bench.reader()
    fresh.open("owner", 2, owner.expose(100, generation=2), bench.deadline())


@pytest.mark.parametrize("sizes", [[1000, 1000], [2 * MIB]], ids=["gathered", "whole"])
def test_memory_that_is_freed_while_it_can_be_read_ends_the_pass_and_not_the_owner(
    bench: Any, sizes: list[int]
) -> None:
    owner, here = bench.owner(), bench.reader()
    here.open("owner", 1, owner.expose(*sizes), bench.deadline())
    target, region = bench.arena(here, sum(sizes))
    copies = [Copy("owner", index, 0, 0, index * size, size) for index, size in enumerate(sizes)]
    owner.ask("lose", generation=1)
    running = here.submit(here.prepare(region, copies))
    with pytest.raises(Revoked):
        poll_to_the_end(bench, here, running)
    assert not target.any()
    bench.reader().open("owner", 2, owner.expose(100, generation=2), bench.deadline())


def test_a_revoked_generation_cannot_be_opened(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        here.open("owner", 1, handle, bench.deadline())


def test_a_handle_is_refused_before_ucx_sees_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, here = bench.owner(), bench.reader()
    good = owner.expose(100)
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Fabric, "connect", lambda *args: seen.append("connect"))
        changed = json.loads(good)
        changed["address"] = base64.b64encode(b"another").decode()
        for cls, name, generation, handle in (
            (CorruptTransfer, "owner", 1, good[:-1]),
            (CorruptTransfer, "owner", 1, json.dumps(changed).encode()),
            (InvalidInfo, "other", 1, good),
            (InvalidInfo, "owner", 2, good),
        ):
            with pytest.raises(cls):
                here.open(name, generation, handle, bench.deadline())
    assert seen == []
    here.open("owner", 1, good, bench.deadline())


def test_another_process_at_the_owners_address_does_not_answer(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100)) | {"nonce": secrets.token_hex(16)}
    with pytest.raises(Timeout):
        here.open("owner", 1, json.dumps(handle).encode(), bench.deadline(0.3))
    assert owner.ask("reported", ticket=1)["garbage"] == 1


def test_a_strangers_messages_are_dropped(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100))
    here.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    stranger = Fabric()
    peer = stranger.connect(base64.b64decode(handle["address"]))
    session = secrets.token_bytes(16)
    said = [
        (b"\0", messages.REQUEST_TAG),
        (secrets.token_bytes(1000), messages.REQUEST_TAG),
        (messages.pack(messages.Begin(session, 5, 1)), messages.REQUEST_TAG),
        (messages.pack_read(session, 5, 6, b"\0" * 20), messages.REQUEST_TAG),
        (bytes(messages.MAX_BYTES + 1), messages.REQUEST_TAG),
        (bytes(8 * MIB), 12345),
    ]
    for data, tag in said:
        stranger.say(peer, data, tag)

    def dropped() -> bool:
        stranger.drive()
        return bool(owner.ask("reported", ticket=1)["garbage"] >= len(said))

    bench.until(dropped)
    stranger.destroy()
    target, region = bench.arena(here, 100)
    bench.pass_over(here, here.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)]))
    assert torch.equal(target, bench.content(100, 0))


def test_a_read_outside_the_memory_is_never_answered(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100)) | {"sizes": [1000]}
    here.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    target, region = bench.arena(here, 1000)
    running = here.submit(here.prepare(region, [Copy("owner", 0, 0, 0, 0, 1000)]))

    def refused() -> bool:
        assert not here.poll(running).done
        return bool(owner.ask("reported", ticket=1)["garbage"] == 1)

    bench.until(refused)
    assert here.cancel(running)
    assert not target.any()


def test_a_reader_that_goes_while_it_is_answered_is_no_error_of_the_owner(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for UCX's refusal, which has to come between two looks at the reader."""
    owner, first, second = bench.reader("owner"), bench.reader(), bench.reader()
    handle = owner.expose(owner.register([bench.content(100, 0)]), 1)

    def gone(*_: object) -> int:
        raise PeerDead("Gone")

    with serving(owner):
        for here in (first, second):
            here.open("owner", 1, handle, bench.deadline())
        plans = []
        for here in (first, second):
            target, region = bench.arena(here, 100)
            plans.append(here.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)]))
        with monkeypatch.context() as patch:
            patch.setattr(owner._fabric, "send", gone)
            running = first.submit(plans[0])
            with pytest.raises(PeerDead):
                poll_to_the_end(bench, first, running)
        bench.pass_over(second, plans[1])
    assert torch.equal(target, bench.content(100, 0))


@contextmanager
def serving(owner: Any) -> Iterator[None]:
    """An owner of this process polls; what it raises is raised here."""
    stop, raised = threading.Event(), []

    def serve() -> None:
        try:
            while not stop.wait(0.001):
                owner.progress()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert raised == []


def test_an_address_that_ucx_cannot_read_is_a_typed_error(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    address = bytes(64)
    changed = json.loads(owner.expose(100)) | {
        "address": base64.b64encode(address).decode(),
        "digest": hashlib.sha256(address).hexdigest(),
    }
    with pytest.raises(WeightTransferError):
        here.open("owner", 1, json.dumps(changed).encode(), bench.deadline(1.0))


def test_a_closed_transport_says_so(bench: Any) -> None:
    here = bench.reader()
    _, region = bench.arena(here, 10)
    here.close()
    here.close()
    for use in (
        lambda: here.register([torch.zeros(1, dtype=torch.uint8)]),
        lambda: here.prepare(region, []),
        lambda: here.expose(region, 1),
        here.progress,
    ):
        with pytest.raises(TransportError):
            use()
