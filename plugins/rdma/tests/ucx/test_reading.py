"""Bytes from a real owner, in another process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from vllm_wt.errors import OutOfBounds, WrongOrder
from vllm_wt.transport import Copy
from vllm_wt_rdma.ucx import fabric

MIB = 1 << 20


def whole(owner: str, sizes: list[int]) -> tuple[list[Copy], int]:
    """Whole source buffers into target buffer 0, one behind the other, and their total."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [Copy(owner, k, 0, 0, ends[k], size) for k, size in enumerate(sizes)], ends[-1]


def expected(bench: Any, sizes: list[int], seed: int) -> torch.Tensor:
    return torch.cat([bench.content(size, seed + k) for k, size in enumerate(sizes)])


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_later_rounds_read_new_values(
    bench: Any, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    sizes = [1, 3, 4097, 65_537, 1_000_003, 40 * MIB + 1]
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(*sizes), bench.deadline())
    copies, total = whole("owner", sizes)
    target, region = bench.arena(reader, total)
    plan = reader.prepare(region, copies)
    for seed in (0, 1000):
        owner.ask("refill", generation=1, seed=seed)
        operation = bench.pass_over(reader, plan)
        assert reader.poll(operation).nbytes == total
        assert torch.equal(target, expected(bench, sizes, seed))


def test_many_short_copies_are_few_messages(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    real = fabric.Fabric.receive

    def counted(self: Any, tensor: torch.Tensor, tag: int) -> int:
        sent.append(tensor.numel())
        return real(self, tensor, tag)

    monkeypatch.setattr(fabric.Fabric, "receive", counted)
    sizes = [1000] * 10_000
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(*sizes), bench.deadline())
    copies, total = whole("owner", sizes)
    target, region = bench.arena(reader, total)
    bench.pass_over(reader, reader.prepare(region, copies[::-1]))
    assert torch.equal(target, expected(bench, sizes, 0))
    assert sum(sent) == total
    assert len(sent) < 50


def test_a_plan_without_copies_is_done_at_once(bench: Any) -> None:
    reader = bench.reader()
    _, region = bench.arena(reader, 1)
    progress = reader.poll(reader.submit(reader.prepare(region, [])))
    assert (progress.done, progress.nbytes) == (True, 0)


def test_a_copy_outside_the_owners_memory_is_refused(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    _, region = bench.arena(reader, 200)
    with pytest.raises(OutOfBounds):
        reader.prepare(region, [Copy("owner", 0, 1, 0, 0, 100)])


def test_a_plan_has_one_pass_at_a_time(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader()
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    target, region = bench.arena(reader, 100)
    plan = reader.prepare(region, [Copy("owner", 0, 0, 0, 0, 100)])
    running = reader.submit(plan)
    with pytest.raises(WrongOrder):
        reader.submit(plan)
    bench.until(lambda: reader.poll(running).done)
    assert torch.equal(target, bench.content(100, 0))


def test_what_readers_report_is_known_by_ticket(bench: Any) -> None:
    owner, reader = bench.owner(), bench.reader("reader")
    reader.open("owner", 1, owner.expose(100), bench.deadline())
    reader.notify("owner", 7)
    bench.until(lambda: owner.ask("reported", ticket=7)["readers"] == ["reader"])
    assert owner.ask("reported", ticket=8) == {"readers": [], "garbage": 0}


def test_settings_of_ucx_stay_as_they_were(bench: Any) -> None:
    bench.reader()
    assert "UCX_RNDV_FRAG_MEM_TYPE" not in os.environ
