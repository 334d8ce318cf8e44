"""Bytes of a real owner, in another process."""

from __future__ import annotations

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from vllm_wt.errors import OutOfBounds, TransportError, WrongOrder
from vllm_wt.transport import Copy, MappingTransport
from vllm_wt_ipc import batching
from vllm_wt_ipc.transport import IpcTransport

SIZES = [1, 3, 4097, 65_537, 1_000_003]


def copies_of(owner: str, sizes: list[int]) -> tuple[list[Copy], int]:
    """Whole source buffers into target buffer 0, one behind the other, and their total."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [Copy(owner, k, 0, 0, ends[k], size) for k, size in enumerate(sizes)], ends[-1]


def expected(bench: Any, sizes: list[int], seed: int) -> torch.Tensor:
    return torch.cat([bench.content(size, seed + k) for k, size in enumerate(sizes)])


@pytest.mark.parametrize("kind", ["allocated", "shared", "views"])
def test_odd_sizes_and_offsets_arrive_exactly(bench: Any, kind: str) -> None:
    _, reader = bench.opened(*SIZES, seed=10, kind=kind)
    target, region = bench.arena(reader, 200_000)
    runs = [  # source, source offset, target offset, bytes
        (0, 0, 5, 1),
        (1, 1, 7, 1),
        (1, 2, 11, 1),
        (2, 1, 13, 4095),
        (3, 65_536, 5001, 1),
        (3, 0, 6001, 65_535),
        (4, 777_777, 100_001, 77_777),
    ]
    plan = reader.prepare(region, [Copy("owner", s, so, 0, to, n) for s, so, to, n in runs])
    operation = bench.pass_over(reader, plan)
    assert reader.poll(operation).nbytes == sum(n for *_, n in runs)
    wanted = torch.zeros_like(target)
    for source, source_offset, target_offset, nbytes in runs:
        content = bench.content(SIZES[source], 10 + source)
        wanted[target_offset : target_offset + nbytes] = content[
            source_offset : source_offset + nbytes
        ]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("kind", ["allocated", "shared", "views"])
def test_what_is_mapped_is_the_owners_own_memory(bench: Any, kind: str) -> None:
    owner, reader = bench.opened(*SIZES, kind=kind)
    mapped = reader.map("owner")
    assert [(b.dtype, list(b.shape)) for b in mapped] == [(torch.uint8, [n]) for n in SIZES]
    assert torch.equal(torch.cat(list(mapped)), expected(bench, SIZES, 0))
    owner.ask("refill", generation=1, seed=100)
    assert torch.equal(torch.cat(list(mapped)), expected(bench, SIZES, 100))
    assert all(a is b for a, b in zip(mapped, reader.map("owner"), strict=True))
    reader.check("owner")


def test_buffers_of_one_allocation_are_mapped_once(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    handle = owner.ask("expose_one", generation=1, sizes=SIZES, seed=0).encode()
    reader.open("owner", 1, handle, bench.deadline())
    assert len({b.untyped_storage().data_ptr() for b in reader.map("owner")}) == 1
    assert torch.equal(torch.cat(list(reader.map("owner"))), expected(bench, SIZES, 0))


def test_more_segments_than_fit_in_a_packet(bench: Any) -> None:
    sizes = [5] * 700
    _, reader = bench.opened(*sizes)
    assert torch.equal(torch.cat(list(reader.map("owner"))), expected(bench, sizes, 0))


def test_later_rounds_read_new_values(bench: Any) -> None:
    sizes = [1 + 37 * k for k in range(300)]
    owner, reader = bench.opened(*sizes)
    copies, total = copies_of("owner", sizes)
    target, region = bench.arena(reader, total)
    plan = reader.prepare(region, copies)
    for seed in (0, 1000, 2000):
        owner.ask("refill", generation=1, seed=seed)
        bench.pass_over(reader, plan)
        assert torch.equal(target, expected(bench, sizes, seed))


def test_a_read_in_many_parts_arrives_exactly(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PART_BYTES", 10_007)
    sizes = [100_003, 17, 9_999, 50_021]
    _, reader = bench.opened(*sizes)
    copies, total = copies_of("owner", sizes)
    target, region = bench.arena(reader, total)
    running = reader.submit(reader.prepare(region, copies))
    amounts = [reader.poll(running).nbytes]
    while amounts[-1] < total:
        amounts.append(reader.poll(running).nbytes)
    assert reader.poll(running).done
    assert torch.equal(target, expected(bench, sizes, 0))
    assert all(0 < after - before <= 10_007 for before, after in itertools.pairwise(amounts))


def test_a_stopped_owner_does_not_disturb_a_pass(bench: Any) -> None:
    owner, reader = bench.opened(*SIZES)
    copies, total = copies_of("owner", SIZES)
    target, region = bench.arena(reader, total)
    owner.signal(signal.SIGSTOP)
    bench.pass_over(reader, reader.prepare(region, copies))
    reader.check("owner")
    reader.notify("owner", 1)
    owner.signal(signal.SIGCONT)
    assert torch.equal(target, expected(bench, SIZES, 0))
    bench.until(lambda: owner.ask("reported", ticket=1) == [reader.name])


def test_a_plan_without_copies_is_done_at_once(bench: Any) -> None:
    reader = bench.reader()
    _, region = bench.arena(reader, 1)
    progress = reader.poll(reader.submit(reader.prepare(region, [])))
    assert (progress.done, progress.nbytes) == (True, 0)


def test_two_owners_in_one_plan(bench: Any) -> None:
    first, second, reader = bench.owner("first"), bench.owner("second"), bench.reader()
    reader.open("first", 1, first.expose(5000, seed=1), bench.deadline())
    reader.open("second", 9, second.expose(3000, generation=9, seed=2), bench.deadline())
    target, region = bench.arena(reader, 8000)
    plan = reader.prepare(
        region, [Copy("second", 0, 0, 0, 0, 3000), Copy("first", 0, 0, 0, 3000, 5000)]
    )
    bench.pass_over(reader, plan)
    assert torch.equal(target, torch.cat([bench.content(3000, 2), bench.content(5000, 1)]))


def test_a_cancelled_pass_leaves_the_plan_usable(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "PART_BYTES", 1000)
    _, reader = bench.opened(10_000)
    target, region = bench.arena(reader, 10_000)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 10_000)])
    running = reader.submit(plan)
    assert not reader.poll(running).done
    with pytest.raises(WrongOrder):
        reader.submit(plan)
    assert reader.cancel(running)
    with pytest.raises(WrongOrder):
        reader.poll(running)
    done = bench.pass_over(reader, plan)
    assert reader.cancel(done)
    assert torch.equal(target, bench.content(10_000, 0))


def test_plans_end_with_their_region(bench: Any) -> None:
    _, reader = bench.opened(100)
    target, first = bench.arena(reader, 100)
    _, second = bench.arena(reader, 100)
    copies = [Copy("owner", 0, 0, 0, 0, 100)]
    on_first, on_second = reader.prepare(first, copies), reader.prepare(second, copies)
    under_way = reader.submit(on_first)
    reader.unregister(first)
    for use in (
        lambda: reader.submit(on_first),
        lambda: reader.poll(under_way),
        lambda: reader.prepare(first, copies),
        lambda: reader.unregister(first),
    ):
        with pytest.raises(TransportError):
            use()
    assert not target.any()
    bench.pass_over(reader, on_second)


def test_copies_are_checked_against_what_the_owner_exposes(bench: Any) -> None:
    _, reader = bench.opened(100, 50)
    target, region = bench.arena(reader, 1000)
    for wrong in (
        Copy("owner", 1, 0, 0, 100, 51),
        Copy("owner", 2, 0, 0, 0, 1),
        Copy("owner", 0, -1, 0, 0, 1),
        Copy("owner", 0, 0, 0, 0, 0),
        Copy("owner", 0, 0, 0, 901, 100),
        Copy("owner", 0, 0, 1, 0, 1),
    ):
        with pytest.raises(OutOfBounds) as caught:
            reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100), wrong])
        assert caught.value.where == "copy 1"
    with pytest.raises(WrongOrder):
        reader.prepare(region, [Copy("other", 0, 0, 0, 0, 1)])
    assert not target.any()


def test_more_copies_than_declared_are_refused(bench: Any) -> None:
    _, reader = bench.opened(100)
    _, region = bench.arena(reader, 100)
    too_many = [Copy("owner", 0, 0, 0, 0, 1)] * (reader.properties.max_descriptors + 1)
    with pytest.raises(TransportError) as caught:
        reader.prepare(region, too_many)
    assert str(len(too_many)) in str(caught.value)


def test_a_region_without_buffers_can_be_exposed_and_opened(bench: Any) -> None:
    _, reader = bench.opened()
    _, region = bench.arena(reader, 1)
    assert list(reader.map("owner")) == []
    with pytest.raises(OutOfBounds):
        reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 1)])


@pytest.mark.parametrize("name", ["", "a|b", "a b", "x" * 129, "\u00fc"])
def test_names_out_of_the_contract_are_refused(name: str) -> None:
    with pytest.raises(TransportError):
        IpcTransport(name, torch.device("cpu"))


def test_it_maps(bench: Any) -> None:
    reader = bench.reader()
    assert isinstance(reader, MappingTransport)
    assert reader.properties.maps


def test_the_owner_learns_who_has_which_ticket(bench: Any) -> None:
    owner = bench.owner()
    readers = [bench.reader("r0"), bench.reader("r" * 128)]
    handle = owner.expose(10)
    for reader in readers:
        reader.open("owner", 1, handle, bench.deadline())
    readers[0].notify("owner", 6)
    bench.until(lambda: owner.ask("reported", ticket=6) == ["r0"])
    readers[1].notify("owner", 2**63 - 1)
    bench.until(lambda: owner.ask("reported", ticket=2**63 - 1) == ["r" * 128])
    assert owner.ask("reported", ticket=6) == ["r0"]
    assert owner.ask("reported", ticket=5) == []
    for ticket in range(10, 20):
        readers[0].notify("owner", ticket)
    bench.until(lambda: owner.ask("reported", ticket=19) == ["r0"])
    assert owner.ask("reported", ticket=6) == []
    with pytest.raises(WrongOrder):
        readers[0].notify("other", 1)


def test_an_owner_that_listens_hears_who_comes_and_what_is_reported(bench: Any) -> None:
    owner, reader = bench.reader("owner"), bench.reader("r0")
    handle = owner.expose(owner.register([owner.allocate(10, torch.device("cpu"))]), 1)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(reader.open, "owner", 1, handle, bench.deadline())
        while not opened.done():
            owner.listen(0.01)
            owner.progress()
        opened.result()
        owner.listen(0.001)  # nobody says anything
        assert not owner.readers(6)
        pool.submit(reader.notify, "owner", 6)
        owner.listen(60)
        owner.progress()
        assert owner.readers(6) == {"r0"}


def test_memory_that_moves_leaves_nothing_behind(bench: Any) -> None:
    """Two hundred generations, of which every second one is opened by nobody."""
    owner = bench.owner()
    before: tuple[dict[str, int], dict[str, int]] | None = None
    for generation in range(1, 202):
        handle = owner.expose(
            5000, 70_000, generation=generation, seed=generation, kind="allocated"
        )
        if generation % 2:
            reader = bench.reader("reader")
            reader.open("owner", generation, handle, bench.deadline())
            target, region = bench.arena(reader, 70_000)
            bench.pass_over(reader, reader.prepare(region, [Copy("owner", 1, 0, 0, 0, 70_000)]))
            assert torch.equal(target, bench.content(70_000, generation + 1))
            reader.close()
            del target, region
        owner.ask("revoke", generation=generation)
        owner.ask("drop", generation=generation)
        if generation == 3:
            bench.until(lambda: owner.ask("connections") == 0)
            before = owner.ask("held"), bench.held()
    bench.until(lambda: owner.ask("connections") == 0)
    assert before is not None
    for then, now in zip(before, (owner.ask("held"), bench.held()), strict=True):
        assert now["files"] <= then["files"]
        assert now["threads"] <= then["threads"]
        assert now["maps"] <= then["maps"] + 16, (then, now)
