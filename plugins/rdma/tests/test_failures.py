"""Peers that die, stall, revoke or restart: a typed error, and nothing written afterwards."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
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
    WrongOrder,
)
from vllm_wt.transport import Copy
from vllm_wt_rdma import batching, operation

MIB = 1 << 20


def small_chunks(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    for module in (batching, operation):
        monkeypatch.setattr(module, "CHUNK_BYTES", nbytes)
    monkeypatch.setattr(
        operation, "_IN_FLIGHT_BYTES", 2 * nbytes
    )  # so that one poll can't do it all


def half_way(bench: Any, reader: Any, owner: Any, nbytes: int) -> tuple[torch.Tensor, Any]:
    """A read of which some bytes have landed, and not all."""
    reader.open("owner", 1, owner.expose(nbytes), bench.deadline())
    target, region = bench.arena(reader, nbytes)
    running = reader.submit(reader.prepare(region, [Copy("owner", 0, 0, 0, 0, nbytes)]))

    def begun() -> bool:
        assert not reader.poll(running).done
        return bool(target[:64].any())

    bench.until(begun)
    return target, running


def poll_to_the_end(bench: Any, reader: Any, running: Any) -> None:
    bench.until(lambda: reader.poll(running).done)


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_an_owner_killed_during_a_read_is_peer_dead(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    small_chunks(monkeypatch, 16 * MIB)
    owner, reader = bench.owner(), bench.reader()
    target, running = half_way(bench, reader, owner, 64 * MIB)
    owner.kill()
    with pytest.raises(PeerDead) as caught:
        poll_to_the_end(bench, reader, running)
    assert caught.value.backend == "rdma"
    assert caught.value.cure
    assert reader.cancel(running)
    with pytest.raises(TransportError):
        reader.register([target])
    with pytest.raises(WeightTransferError):
        reader.poll(running)
    reader.close()


def test_an_owner_killed_between_rounds_is_peer_dead(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, region = bench.arena(reader, 100)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
    bench.pass_over(reader, plan)
    owner.kill()
    running = reader.submit(plan)
    with pytest.raises(PeerDead):
        poll_to_the_end(bench, reader, running)


def test_a_dead_owner_cannot_be_opened(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.kill()
    with pytest.raises(PeerDead):
        reader.open("owner", 1, handle, bench.deadline())


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_an_owner_that_does_not_poll_is_a_timeout_at_open(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    owner, reader = bench.owner(), bench.reader()
    handle = owner.expose(100)
    owner.ask("poll", on=False)
    with pytest.raises(Timeout) as caught:
        reader.open("owner", 1, handle, bench.deadline(0.3))
    assert caught.value.where == "open"
    with pytest.raises(TransportError):
        reader.open("owner", 1, handle, bench.deadline())
    owner.ask("poll", on=True)
    bench.reader().open("owner", 1, handle, bench.deadline())


@pytest.mark.usefixtures("tcp")
def test_nothing_is_written_after_a_cancel(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    target, running = half_way(bench, reader, owner, 64 * MIB)
    owner.signal(signal.SIGSTOP)
    assert reader.cancel(running)
    target.zero_()
    owner.signal(signal.SIGCONT)
    # UCX may abort an owner that finds its reader gone after not polling for a while.
    with suppress(AssertionError, OSError):
        owner.ask("reported", ticket=1)
    for _ in range(1000):
        with suppress(WeightTransferError):
            reader.progress()
    assert not target.any()


@pytest.mark.usefixtures("tcp")
@pytest.mark.parametrize("how", ["drop", "unregister"])
def test_a_pass_that_was_neither_ended_nor_cancelled_spends_the_transport(
    bench: Any, how: str
) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(64 * MIB), bench.deadline())
    target, region = bench.arena(reader, 64 * MIB)
    running = reader.submit(reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 64 * MIB)]))
    bench.until(lambda: not reader.poll(running).done and bool(target[:64].any()))
    owner.signal(signal.SIGSTOP)
    end: dict[str, Callable[[], Any]] = {
        "drop": lambda: reader.prepare(region, []),
        "unregister": lambda: reader.unregister(region),
    }
    if how == "drop":
        del running
    with pytest.raises(WrongOrder):
        end[how]()
    with pytest.raises(TransportError):
        reader.progress()


@pytest.mark.usefixtures("tcp")
def test_closing_during_a_read_from_a_stopped_owner_ends(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    half_way(bench, reader, owner, 64 * MIB)
    owner.signal(signal.SIGSTOP)
    reader.close()
    reader.close()


@pytest.mark.usefixtures("tcp")
def test_a_cancel_while_nixls_own_exception_is_handled_can_be_repeated(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = bench.owner(), bench.reader()
    _, running = half_way(bench, reader, owner, 64 * MIB)
    owner.signal(signal.SIGSTOP)
    agent = reader._endpoint._agent
    try:
        assert not reader.cancel(running)  # the agent is still referred to, so it may still write
    finally:
        del agent
    assert reader.cancel(running)


def test_a_reader_notices_before_it_starts_that_a_generation_was_revoked(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    target, region = bench.arena(reader, 100)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked) as caught:
        poll_to_the_end(bench, reader, reader.submit(plan))
    assert "generation 1" in str(caught.value)
    assert not target.any()


def test_a_reader_notices_that_a_generation_was_revoked_while_it_read(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, MIB)
    owner, reader = bench.owner(), bench.reader()
    _, running = half_way(bench, reader, owner, 8 * MIB)
    owner.ask("revoke", generation=1)
    with pytest.raises(Revoked):
        poll_to_the_end(bench, reader, running)


def test_memory_that_is_unregistered_is_revoked(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, region = bench.arena(reader, 100)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
    owner.ask("drop", generation=1)
    with pytest.raises(Revoked):
        poll_to_the_end(bench, reader, reader.submit(plan))


def test_a_new_generation_is_read_through_a_new_transport(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    old = owner.expose(100, generation=1)
    reader.open("owner", 1, old, bench.deadline())
    owner.ask("revoke", generation=1)
    owner.ask("drop", generation=1)
    new = owner.expose(300, generation=2, seed=5)
    with pytest.raises(WrongOrder):
        reader.open("owner", 2, new, bench.deadline())
    fresh = bench.reader()
    with pytest.raises(Revoked):
        fresh.open("owner", 1, old, bench.deadline())
    fresh.open("owner", 2, new, bench.deadline())
    target, region = bench.arena(fresh, 300)
    bench.pass_over(fresh, fresh.prepare(region, [Copy("owner", 0, 0, 0, 0, 300)]))
    assert torch.equal(target, bench.content(300, 5))


def test_an_owner_that_was_never_opened_has_no_copies(bench: Any) -> None:
    reader = bench.reader()
    _, region = bench.arena(reader, 10)
    with pytest.raises(Revoked):
        reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 10)])


def test_an_owner_that_restarts_under_its_name_is_reached_again(bench: Any) -> None:
    first, reader = bench.owner(), bench.reader()
    old = first.expose(100, seed=1)
    reader.open("owner", 1, old, bench.deadline())
    first.kill()
    second = bench.owner()
    fresh = bench.reader()
    fresh.open("owner", 1, second.expose(100, seed=2), bench.deadline())
    target, region = bench.arena(fresh, 100)
    bench.pass_over(fresh, fresh.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)]))
    assert torch.equal(target, bench.content(100, 2))


def test_another_process_at_the_owners_address_is_not_taken_for_it(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100))
    handle["nonce"] ^= 1
    with pytest.raises(Revoked):
        reader.open("owner", 1, json.dumps(handle).encode(), bench.deadline())


def test_a_handle_is_refused_before_nixl_sees_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = bench.owner(), bench.reader()
    good = owner.expose(100)
    seen: list[str] = []
    monkeypatch.setattr(reader._endpoint, "add_peer", lambda *args: seen.append("add_peer"))
    with pytest.raises(CorruptTransfer):
        reader.open("owner", 1, good[:-1], bench.deadline())
    with pytest.raises(InvalidInfo):
        reader.open("other", 1, good, bench.deadline())
    with pytest.raises(InvalidInfo):
        reader.open("owner", 2, good, bench.deadline())
    assert seen == []
    monkeypatch.undo()
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    reader.open("owner", 1, good, bench.deadline())


def test_metadata_that_nixl_cannot_read_is_corrupt(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100)) | {"metadata": "AAAA" * 30}
    with pytest.raises(CorruptTransfer):
        reader.open("owner", 1, json.dumps(handle).encode(), bench.deadline())


def test_metadata_of_another_owner_is_corrupt(bench: Any) -> None:
    owner, other, reader = bench.owner(), bench.owner("other"), bench.reader()
    handle = json.loads(owner.expose(100))
    handle["metadata"] = json.loads(other.expose(100))["metadata"]
    with pytest.raises(CorruptTransfer) as caught:
        reader.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    assert (caught.value.expected, caught.value.got) == ("owner", "other")


def test_addresses_that_the_owner_never_registered_are_revoked(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = json.loads(owner.expose(100))
    handle["buffers"][0]["nbytes"] = 1 << 40
    reader.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    _, region = bench.arena(reader, 4096)
    with pytest.raises(Revoked):
        reader.prepare(region, [Copy("owner", 0, 1 << 30, 0, 0, 4096)])


def test_a_generation_names_one_region_and_is_not_used_again(bench: Any) -> None:
    here = bench.reader("here")
    _, first = bench.arena(here, 10)
    _, second = bench.arena(here, 10)
    handle = here.expose(first, 1)
    assert here.expose(first, 1) == handle
    with pytest.raises(TransportError):
        here.expose(second, 1)
    here.revoke(1)
    here.revoke(1)
    here.revoke(99)
    with pytest.raises(Revoked):
        here.expose(first, 1)
    here.expose(second, 2)


def test_a_closed_transport_says_so(bench: Any) -> None:
    reader = bench.reader()
    _, region = bench.arena(reader, 10)
    reader.close()
    reader.close()
    for use in (
        lambda: reader.register([torch.zeros(1, dtype=torch.uint8)]),
        lambda: reader.prepare(region, []),
        lambda: reader.expose(region, 1),
        reader.progress,
    ):
        with pytest.raises(TransportError):
            use()


def test_an_owner_process_ends_cleanly(bench: Any) -> None:
    owner = bench.owner()
    owner.expose(100)
    owner.hang_up()
    owner.await_end()
