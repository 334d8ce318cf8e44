"""Peers that are killed or stopped around a read, each a process: nobody else dies or hangs.

By what this backend lets UCX take, and by what an operator may add to it: copies between processes.
Waits have their deadlines in the endpoints; one that has died fails whatever it is asked next.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from vllm_wt.errors import PeerDead
from vllm_wt.transport import Copy

MIB = 1 << 20
NBYTES = 128 * MIB


@pytest.fixture(params=["chosen", "all"], autouse=True)
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "all":
        monkeypatch.setenv("UCX_TLS", "all")
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)


def reader_of(bench: Any, handle: bytes, name: str = "reader") -> Any:
    """A process that has opened an owner."""
    reader = bench.owner(name)
    reader.ask("open", owner="owner", handle=handle.decode(), nbytes=NBYTES)
    return reader


@pytest.mark.parametrize("landed", [0, 1, NBYTES // 2, NBYTES], ids=lambda n: f"{n // MIB}MiB")
def test_a_reader_outlives_its_owner_and_reads_from_the_next(bench: Any, landed: int) -> None:
    owner = bench.owner()
    reader = reader_of(bench, owner.expose(NBYTES))
    reader.ask("read", until=landed)
    reader.begin("read_on")
    owner.kill()
    assert reader.result() == {"error": "PeerDead", "cancelled": True}
    reader.ask("renew")
    handle = bench.owner().expose(NBYTES, seed=1).decode()
    reader.ask("open", owner="owner", handle=handle, nbytes=NBYTES)
    reader.ask("read", until=NBYTES)
    assert reader.ask("finish", seed=1)


def test_a_reader_that_looks_when_its_owner_has_long_been_dead(bench: Any) -> None:
    owner = bench.owner()
    reader = reader_of(bench, owner.expose(NBYTES))
    assert reader.ask("read", until=1) < NBYTES
    owner.kill()
    assert reader.ask("read_on") == {"error": "PeerDead", "cancelled": True}


def test_an_owner_killed_between_two_reads_is_peer_dead(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    here.open("owner", 1, owner.expose(MIB), bench.deadline())
    target, region = bench.arena(here, MIB)
    plan = here.prepare(region, [Copy("owner", 0, 0, 0, 0, MIB)])
    bench.pass_over(here, plan)
    owner.kill()
    target.zero_()
    running = here.submit(plan)
    with pytest.raises(PeerDead):
        bench.until(lambda: here.poll(running).done)
    assert here.cancel(running)
    assert not target.any()


def test_an_owner_that_is_stopped_and_goes_on_is_read_to_the_end(bench: Any) -> None:
    owner, here = bench.owner(), bench.reader()
    here.open("owner", 1, owner.expose(NBYTES), bench.deadline())
    target, region = bench.arena(here, NBYTES)
    running = here.submit(here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))
    bench.until(lambda: bool(target[:64].any()) or here.poll(running).done)
    owner.signal(signal.SIGSTOP)
    seen = [here.poll(running) for _ in range(100)]  # each waits a moment for more
    assert not seen[-1].done
    assert seen[-1].nbytes == seen[-2].nbytes
    owner.signal(signal.SIGCONT)
    bench.until(lambda: here.poll(running).done)
    assert torch.equal(target, bench.content(NBYTES, 0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_reader_that_goes_during_its_read_harms_neither_owner_nor_readers(
    bench: Any, number: int
) -> None:
    owner = bench.owner()
    handle = owner.expose(NBYTES)
    first, second = reader_of(bench, handle, "first"), reader_of(bench, handle, "second")
    for reader in (first, second):
        assert reader.ask("read", until=1) < NBYTES
    first.signal(number)
    third = reader_of(bench, handle, "third")
    third.ask("read", until=1)
    for reader in (second, third):
        assert reader.ask("finish", seed=0)
        reader.ask("notify", owner="owner", ticket=7)
    bench.until(lambda: owner.ask("reported", ticket=7)["readers"] == ["second", "third"])
    assert owner.ask("reported", ticket=7)["garbage"] == 0
