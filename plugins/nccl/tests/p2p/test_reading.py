"""What is read, by how many, from how many."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from vllm_wt.errors import BackendUnavailable, OutOfBounds, PeerDead, Revoked, TransportError
from vllm_wt.transport import Copy
from vllm_wt_nccl.p2p import batching, transport
from vllm_wt_nccl.p2p.messages import Fabric
from vllm_wt_nccl.p2p.transport import P2pTransport

MIB = 1 << 20
BUCKET = batching.BUCKET_BYTES[Fabric.GLOO]


def test_more_buckets_than_slots_come_each_pass(bench: Any) -> None:
    nbytes = 7 * BUCKET + 12_345
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(nbytes), bench.deadline())
    target, region = bench.arena(here, nbytes)
    plan = here.prepare(region, [Copy("owner", 0, 0, 0, 0, nbytes)])
    assert len(plan.shares[0].buckets) == 8
    for seed in (0, 5):
        owner.ask("refill", generation=1, seed=seed)
        bench.pass_over(here, plan)
        assert torch.equal(target, bench.content(nbytes, seed))


def test_plans_of_other_sizes_share_the_slots(bench: Any) -> None:
    sizes = (1000, 3 * BUCKET + 5, 1000, 2 * MIB, 3 * BUCKET + 5)
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(max(sizes)), bench.deadline())
    target, region = bench.arena(here, max(sizes))
    plans = {size: here.prepare(region, [Copy("owner", 0, 0, 0, 0, size)]) for size in set(sizes)}
    for seed, size in enumerate(sizes):
        owner.ask("refill", generation=1, seed=seed)
        target.zero_()
        bench.pass_over(here, plans[size])
        assert torch.equal(target[:size], bench.content(max(sizes), seed)[:size])
        assert not target[size:].any()


def test_nothing_holds_memory_that_was_unregistered(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(3 * BUCKET), bench.deadline())
    _, region = bench.arena(here, 3 * BUCKET)
    plan = here.prepare(region, [Copy("owner", 0, 0, 0, 0, 3 * BUCKET)])
    bench.pass_over(here, plan)
    assert owner.ask("held") == len(plan.shares[0]._moves) == 3
    owner.ask("free", generation=1)
    here.unregister(region)
    assert owner.ask("held") == len(plan.shares[0]._moves) == 0
    assert not region.buffers


def test_copies_are_merged_cut_and_exact(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(3 * BUCKET, 5000), bench.deadline())
    target, region = bench.arena(here, 4 * BUCKET)
    long, short = 2 * BUCKET + 77, 11
    copies = [
        Copy("owner", 0, 5, 0, 3, long),
        Copy("owner", 0, 5 + long, 0, 3 + long, 100),
        *(Copy("owner", 1, 2 * i * short, 0, 3 * BUCKET + i * short, short) for i in range(200)),
    ]
    plan = here.prepare(region, copies)
    first = plan.shares[0].buckets[0].copies
    assert [copy.nbytes for copy in first] == [BUCKET]
    assert plan.shares[0].buckets[2].copies[0].nbytes == 77 + 100
    bench.pass_over(here, plan)
    expected = torch.zeros(4 * BUCKET, dtype=torch.uint8)
    sources = [bench.content(3 * BUCKET, 0), bench.content(5000, 1)]
    for copy in copies:
        part = sources[copy.source][copy.source_offset :][: copy.nbytes]
        expected[copy.target_offset : copy.target_offset + copy.nbytes] = part
    assert torch.equal(target, expected)


def test_several_readers_read_at_a_time(bench: Any) -> None:
    owner = bench.process()
    handle = owner.expose(20 * MIB).decode()
    readers = [bench.process(f"reader{number}") for number in range(4)]
    for reader in readers:
        reader.ask("open", owner="owner", handle=handle, nbytes=20 * MIB)
    for reader in readers:
        reader.begin("read", seed=0)
    assert [reader.result() for reader in readers] == [True] * 4
    for reader in readers:
        reader.ask("notify", owner="owner", ticket=9)
    names = sorted(reader.name for reader in readers)
    bench.until(lambda: owner.ask("reported", ticket=9)["readers"] == names)


def test_one_plan_reads_from_several_owners_and_two_passes_are_under_way(bench: Any) -> None:
    here, nbytes = bench.reader(), 9 * MIB
    target, region = bench.arena(here, 6 * nbytes)
    copies: list[list[Copy]] = [[], []]
    for number in range(3):
        owner = bench.process(f"owner{number}")
        handle = owner.expose(nbytes, seed=10 * number)
        here.open(owner.name, 1, handle, bench.deadline())
        for half in (0, 1):
            start = (3 * half + number) * nbytes
            copies[half].append(Copy(owner.name, 0, 0, 0, start, nbytes))
    running = [here.submit(here.prepare(region, each)) for each in copies]
    bench.until(lambda: here.poll(running[1]).done)  # which has to wait for the other one
    bench.until(lambda: here.poll(running[0]).done)
    expected = torch.cat([bench.content(nbytes, 10 * number) for number in range(3)] * 2)
    assert torch.equal(target, expected)


def test_an_owner_that_revokes_leaves_the_others(bench: Any) -> None:
    here = bench.reader()
    owners = [bench.process(f"owner{number}") for number in range(2)]
    for owner in owners:
        here.open(owner.name, 1, owner.expose(1000), bench.deadline())
    target, region = bench.arena(here, 2000)
    both = here.prepare(
        region, [Copy(o.name, 0, 0, 0, 1000 * i, 1000) for i, o in enumerate(owners)]
    )
    one = here.prepare(region, [Copy("owner0", 0, 0, 0, 0, 1000)])
    owners[1].ask("revoke", generation=1)
    with pytest.raises(Revoked):
        bench.pass_over(here, both)
    target.zero_()
    bench.pass_over(here, one)
    assert torch.equal(target[:1000], bench.content(1000, 0))
    assert not target[1000:].any()


def test_plans_that_are_dropped_are_forgotten_by_the_owner(bench: Any) -> None:
    """It keeps a bounded number of them."""
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(1000), bench.deadline())
    target, region = bench.arena(here, 1000)
    for _ in range(5000):
        here.prepare(region, [Copy("owner", 0, 0, 0, 0, 1000)])
    bench.pass_over(here, here.prepare(region, [Copy("owner", 0, 0, 0, 0, 1000)]))
    assert torch.equal(target, bench.content(1000, 0))


def test_plans_out_of_bounds_are_refused_by_the_reader_and_by_the_owner(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, here = bench.process(), bench.reader()
    handle = owner.expose(1000)
    here.open("owner", 1, handle, bench.deadline())
    _, region = bench.arena(here, 2000)
    with pytest.raises(OutOfBounds):
        here.prepare(region, [Copy("owner", 0, 500, 0, 0, 501)])
    monkeypatch.setattr(transport.bounds, "check_copies", lambda *args, **kwargs: None)
    with pytest.raises(PeerDead):  # it is turned away
        bench.pass_over(here, here.prepare(region, [Copy("owner", 0, 500, 0, 0, 501)]))
    assert owner.ask("reported", ticket=1)["garbage"] == 1
    bench.reader().open("owner", 1, handle, bench.deadline())


def test_too_many_copies_are_refused(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    here.open("owner", 1, owner.expose(1000), bench.deadline())
    _, region = bench.arena(here, 1000)
    most = here.properties.max_descriptors
    with pytest.raises(TransportError) as caught:
        here.prepare(region, [Copy("owner", 0, 0, 0, 0, 1)] * (most + 1))
    assert str(most) in str(caught.value.expected)


def test_the_loopback_is_of_this_host_alone(bench: Any) -> None:
    owner, here = bench.process(), bench.reader()
    handle = json.loads(owner.expose(1000)) | {"host": "another"}
    handle["ways"] = handle["ways"][:1]
    with pytest.raises(PeerDead) as caught:
        here.open("owner", 1, json.dumps(handle).encode(), bench.deadline())
    assert "loopback" in str(caught.value.got)


def test_a_gpu_without_nccl_s_binding_is_backend_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable) as caught:
        P2pTransport("reader", torch.device("cuda", 0))
    assert caught.value.cure == "pip install nccl4py"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    P2pTransport.require()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendUnavailable):
        P2pTransport.require()


def test_a_name_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(TransportError):
        P2pTransport("a b", torch.device("cpu"))
