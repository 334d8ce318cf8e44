"""Bytes from a real owner, in another process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from vllm_wt.errors import OutOfBounds, Revoked, TransportError, WrongOrder
from vllm_wt.transport import Copy
from vllm_wt_rdma import batching, info, nixl, operation


def copies_of(owner: str, sizes: list[int]) -> tuple[list[Copy], int]:
    """Whole source buffers into target buffer 0, one behind the other, and their total."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [Copy(owner, k, 0, 0, ends[k], size) for k, size in enumerate(sizes)], ends[-1]


def expected(bench: Any, sizes: list[int], seed: int) -> torch.Tensor:
    return torch.cat([bench.content(size, seed + k) for k, size in enumerate(sizes)])


def test_odd_sizes_and_offsets_arrive_exactly(bench: Any) -> None:
    sizes = [1, 3, 4097, 65_537, 1_000_003]
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(*sizes, seed=10), bench.deadline())
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
        content = bench.content(sizes[source], 10 + source)
        wanted[target_offset : target_offset + nbytes] = content[
            source_offset : source_offset + nbytes
        ]
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_later_rounds_read_new_values_and_make_nothing_new(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    calls: list[str] = []
    agent_cls = nixl.load().module.nixl_agent
    for name in ("register_memory", "initialize_xfer", "prep_xfer_dlist", "add_remote_agent"):
        real = getattr(agent_cls, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(agent_cls, name, counted)
    sizes = [1 + 37 * k for k in range(300)]
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(*sizes), bench.deadline())
    copies, total = copies_of("owner", sizes)
    target, region = bench.arena(reader, total)
    plan = reader.prepare(region, copies)
    assert "register_memory" in calls
    calls.clear()
    for seed in (0, 1000, 2000):
        owner.ask("refill", generation=1, seed=seed)
        bench.pass_over(reader, plan)
        assert torch.equal(target, expected(bench, sizes, seed))
    assert calls == []


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_a_read_over_many_chunks_arrives_exactly(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    for module in (batching, operation):
        monkeypatch.setattr(module, "CHUNK_BYTES", 10_007)
    monkeypatch.setattr(operation, "_IN_FLIGHT_BYTES", 20_014)
    sizes = [100_003, 17, 9_999, 50_021]
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(*sizes), bench.deadline())
    copies, total = copies_of("owner", sizes)
    target, region = bench.arena(reader, total)
    running = reader.submit(reader.prepare(region, copies))
    seen = []
    bench.until(lambda: seen.append(reader.poll(running)) or seen[-1].done)
    assert torch.equal(target, expected(bench, sizes, 0))
    amounts = [progress.nbytes for progress in seen]
    assert amounts == sorted(amounts)
    assert amounts[-1] == total
    assert any(0 < amount < total for amount in amounts)


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


def test_a_cancelled_pass_leaves_the_plan_usable_when_nothing_is_stuck(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batching, operation):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(operation, "_IN_FLIGHT_BYTES", 1 << 17)  # no poll can complete it all
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(1 << 20), bench.deadline())
    target, region = bench.arena(reader, 1 << 20)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 1 << 20)])
    running = reader.submit(plan)
    bench.until(lambda: reader.poll(running).nbytes > 0)
    with pytest.raises(WrongOrder):
        reader.submit(plan)
    assert reader.cancel(running)
    with pytest.raises(WrongOrder):
        reader.poll(running)
    bench.pass_over(reader, plan)
    assert torch.equal(target, bench.content(1 << 20, 0))


def test_a_plan_that_was_dropped_is_given_back(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, region = bench.arena(reader, 100)
    copies = [Copy("owner", 0, 0, 0, 0, 100)]
    released = []
    release = type(reader._endpoint).release
    monkeypatch.setattr(
        type(reader._endpoint), "release", lambda self, n: released.append(n) or release(self, n)
    )
    for _ in range(20):
        plan = reader.prepare(region, copies)
    # Two reads a plan, the beacon's and the data's; the last but one was dropped after the last
    # `prepare` had looked.
    assert len(released) == 18 * 2
    bench.pass_over(reader, plan)


def test_plans_end_with_their_region(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, first = bench.arena(reader, 100)
    _, second = bench.arena(reader, 100)
    copies = [Copy("owner", 0, 0, 0, 0, 100)]
    on_first, on_second = reader.prepare(first, copies), reader.prepare(second, copies)
    reader.unregister(first)
    with pytest.raises(Revoked):
        reader.submit(on_first)
    bench.pass_over(reader, on_second)
    with pytest.raises(TransportError):
        reader.prepare(first, copies)
    with pytest.raises(TransportError):
        reader.unregister(first)
    bench.pass_over(reader, on_second)


def test_copies_are_checked_against_what_the_owner_exposes(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100, 50), bench.deadline())
    target, region = bench.arena(reader, 1000)
    with pytest.raises(OutOfBounds) as caught:
        reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100), Copy("owner", 1, 0, 0, 100, 51)])
    assert caught.value.where == "copy 1"
    assert "50 bytes of source buffer 1" in str(caught.value.expected)
    assert not target.any()


def test_more_copies_than_declared_are_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, region = bench.arena(reader, 100)
    too_many = [Copy("owner", 0, 0, 0, 0, 1)] * (reader.properties.max_descriptors + 1)
    with pytest.raises(TransportError) as caught:
        reader.prepare(region, too_many)
    assert str(len(too_many)) in str(caught.value)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.empty((0, 128), dtype=torch.uint8),
        torch.zeros((4, 4), dtype=torch.uint8).t(),
        torch.zeros(4, dtype=torch.uint8, device="meta"),
    ],
    ids=["empty", "empty with columns", "not contiguous", "on the meta device"],
)
def test_buffers_that_cannot_be_registered_are_refused(bench: Any, buffer: torch.Tensor) -> None:
    reader = bench.reader()
    with pytest.raises(TransportError) as caught:
        reader.register([torch.zeros(4, dtype=torch.uint8), buffer])
    assert caught.value.where == "buffer 1"


def test_the_same_memory_twice_in_a_region_is_harmless(bench: Any) -> None:
    owner = bench.owner()
    owner.ask("register_twice")
    assert owner.expose(10)  # NIXL would have crashed the process


def test_a_region_without_buffers_can_be_exposed_and_opened(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(), bench.deadline())
    _, region = bench.arena(reader, 1)
    with pytest.raises(OutOfBounds):
        reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 1)])


@pytest.mark.parametrize("name", ["", "a|b", "a b", "x" * 129, "\u00fc"])
def test_names_that_would_not_survive_a_notification_are_refused(bench: Any, name: str) -> None:
    with pytest.raises(TransportError):
        type(bench.reader())(name, torch.device("cpu"))


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_the_owner_learns_who_has_which_ticket(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    owner = bench.owner()
    readers = [bench.reader("r0"), bench.reader("r1")]
    handle = owner.expose(10)
    for reader in readers:
        reader.open("owner", 1, handle, bench.deadline())
    for text in (b"nonsense", b"r1|6", b"r0|six"):
        readers[0]._endpoint.send("owner", text)
    readers[0].notify("owner", 6)
    bench.until(lambda: owner.ask("reported", ticket=6)["readers"] == ["r0"])
    readers[1].notify("owner", 7)
    bench.until(lambda: owner.ask("reported", ticket=7)["readers"] == ["r1"])
    assert owner.ask("reported", ticket=6) == {"readers": ["r0"], "garbage": 3}
    assert owner.ask("reported", ticket=5)["readers"] == []


def test_notifying_an_owner_that_is_not_open_is_refused(bench: Any) -> None:
    with pytest.raises(Revoked):
        bench.reader().notify("owner", 1)


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_buffers_above_the_limit_of_a_registration_arrive_exactly(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.setattr(info, "PIECE_BYTES", 10_007)
    sizes = [1, 10_006, 10_007, 10_008, 54_321, 7]
    owner, reader = bench.owner(), bench.reader()
    owner.ask("set_piece", nbytes=10_007)
    rows: list[int] = []
    real = reader._endpoint.register

    def register(kind: str, given: Any, memory: Any) -> int:
        rows.extend(nbytes for _, nbytes, _ in given)
        return int(real(kind, given, memory))

    monkeypatch.setattr(reader._endpoint, "register", register)
    exposed = owner.expose(*sizes, seed=4)
    copies, total = copies_of("owner", sizes)
    target, region = bench.arena(reader, total)
    assert rows == [10_007] * 8 + [total - 80_056]
    reader.open("owner", 1, exposed, bench.deadline())
    plan = reader.prepare(region, copies)
    for _ in range(2):
        target.zero_()
        bench.pass_over(reader, plan)
        assert torch.equal(target, expected(bench, sizes, 4))
    reader.unregister(region)
