"""A worker's walk through the buckets: what it keeps of them, bit for bit, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK, digest
from vllm_wt.errors import CorruptTransfer, Timeout, TransportError
from vllm_wt.info import Staging, Verify
from vllm_wt.loading import reception as receptions
from vllm_wt.loading.arena import Arena
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.reception import Reception
from vllm_wt.loading.recorder import record
from vllm_wt.loading.slices import sliced
from vllm_wt.manifest import Manifest
from vllm_wt.packing import as_bytes, meta_of, view_as
from vllm_wt.pull.pouring import Pouring
from vllm_wt.pull.ring import Filling, Ring
from vllm_wt.source import StateDictSource
from vllm_wt_nccl.bucketing import bucketing
from vllm_wt_nccl.receiving import Receiving, arena_nbytes, is_whole
from vllm_wt_nccl.schedule import Schedule

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _tensors() -> Tensors:
    torch.manual_seed(3)
    return {
        "a.weight": torch.randn(300, 40),
        "b.weight": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 7),
        "c.weight": torch.randn(64, 50).T,
        "c.scale": torch.tensor(3.5),
        "d.weight": torch.randint(0, 256, (20_001,), dtype=torch.uint8),
    }


class _Sent:
    """What the trainer has broadcast, taken by one worker in order."""

    def __init__(self, tensors: Tensors, bucket_nbytes: int, verify: Verify) -> None:
        self.manifest = Manifest(tuple(meta_of(n, t) for n, t in tensors.items()))
        self.buckets = bucketing(self.manifest, bucket_nbytes, verify, CPU)
        self.schedule = Schedule.of_one(self.buckets)
        self.buffers: list[torch.Tensor] = []
        self.taken = 0
        ring = Ring(self.buckets, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        digests = torch.zeros(self.buckets.blocks, dtype=torch.int64)

        def ready(bucket: int) -> None:
            first, count = self.buckets.digests_of(bucket)
            self.buffers.append(ring.slot(bucket)[: count * BLOCK].clone())
            if self.buckets.digested:
                self.buffers.append(as_bytes(digests[first : first + count]).clone())

        filling = Filling(
            ring,
            digests if self.buckets.digested else None,
            readers=1,
            have_read=lambda _: 1,
            ready=ready,
            watch=lambda: None,
            deadline=Deadline(30),
        )
        pouring = Pouring(StateDictSource(tensors), self.manifest, self.buckets.packed)
        pouring.begin()
        pouring.prepare(ring)
        pouring.pour(filling)

    def broadcast(self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0) -> _Sent:
        for buffer in buffers:
            buffer.copy_(self.buffers[self.taken])
            self.taken += 1
        return self

    def wait(self, seconds: float) -> bool:
        return True

    def close(self) -> bool:
        return True


def _plan(tensors: Tensors) -> LoadPlan:
    """Of a worker that needs some rows, some columns, and one tensor not at all."""
    model = torch.nn.Module()
    shapes = {"a": (100, 40), "c": (50, 8), "d": (20_001,)}
    for name, shape in shapes.items():
        dtype = torch.uint8 if name == "d" else torch.float32
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        model.add_module(name, module)
    parts = {
        "a.weight": lambda tensor: tensor[150:250],
        "c.weight": lambda tensor: tensor[:, 3:11],
        "d.weight": lambda tensor: tensor,
    }

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in parts:
                model.get_parameter(name).data.copy_(parts[name](tensor))

    return record(model, load, Manifest(tuple(meta_of(n, t) for n, t in tensors.items())))


def _reception(plan: LoadPlan, staging: Staging, gap: int) -> Reception:
    return Reception.planned(plan, sliced(plan, gap), Arena(CPU), staging, host=True)


def _receive(
    sent: _Sent, reception: Reception, watch: Any = lambda: None, seconds: float = 30
) -> tuple[list[list[str]], Tensors]:
    """The names of each call, and all tensors as they were then."""
    arena = torch.full((arena_nbytes(reception, sent.schedule),), 0xAA, dtype=torch.uint8)
    receiving = Receiving(sent.schedule, reception, arena, CPU)
    calls: list[list[str]] = []
    found: Tensors = {}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = list(weights)
        calls.append([name for name, _ in given])
        found.update({name: tensor.clone() for name, tensor in given})

    receiving.run(sent, load, Deadline(seconds), watch)
    return calls, found


def _expected(reception: Reception, tensors: Tensors) -> Tensors:
    parts: Tensors = {}
    for meta in reception.slices.plan.manifest.tensors:
        full = as_bytes(tensors[meta.name].contiguous())
        runs = [full[at : at + nbytes] for at, nbytes in reception.slices.runs[meta.name]]
        parts[meta.name] = view_as(torch.cat([full[:0], *runs]), meta)
    return parts


@pytest.mark.parametrize("verify", ["digest", "bytes"])
@pytest.mark.parametrize("bucket", [BLOCK, 3 * BLOCK, 1 << 20])
def test_everything_comes_where_it_stays(bucket: int, verify: Verify) -> None:
    tensors = _tensors()
    sent = _Sent(tensors, bucket, verify)
    reception = _reception(LoadPlan.of_whole(sent.manifest, "a test"), "device", 0)
    assert is_whole(reception, sent.schedule)
    calls, found = _receive(sent, reception)
    assert calls == [list(tensors)]
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert sent.taken == len(sent.buffers)


@pytest.mark.parametrize("gap", [0, 4096])
@pytest.mark.parametrize("streamed", [0, 1, 1 << 20])
@pytest.mark.parametrize("bucket", [BLOCK, 3 * BLOCK, 1 << 20])
def test_what_is_needed_is_kept(
    monkeypatch: pytest.MonkeyPatch, bucket: int, streamed: int, gap: int
) -> None:
    """All of it until the commit, or a part at a time."""
    monkeypatch.setattr(receptions, "STREAMED_NBYTES", streamed)
    tensors = _tensors()
    sent = _Sent(tensors, bucket, "digest")
    reception = _reception(_plan(tensors), "none" if streamed else "device", gap)
    assert not is_whole(reception, sent.schedule)
    calls, found = _receive(sent, reception)
    expected = _expected(reception, tensors)
    assert "b.weight" not in expected
    assert [name for call in calls for name in call] == list(expected)
    assert calls == [list(part) for part in reception.parts]
    assert (len(calls) > 1) == (streamed == 1)
    for name, tensor in expected.items():
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name
    assert sent.taken == len(sent.buffers)


@pytest.mark.parametrize("bucket", [BLOCK, 3 * BLOCK, 1 << 20])
def test_a_byte_that_is_wrong_is_seen(bucket: int) -> None:
    tensors = _tensors()
    sent = _Sent(tensors, bucket, "digest")
    assert sent.buckets.buckets is not None
    piece = sent.buckets.buckets.pieces("d.weight")[0]
    sent.buffers[2 * piece.bucket][piece.offset + 17] ^= 1
    reception = _reception(LoadPlan.of_whole(sent.manifest, "a test"), "device", 0)
    with pytest.raises(CorruptTransfer, match=r"'d\.weight'"):
        _receive(sent, reception)


def test_a_bucket_in_the_place_of_another_is_seen() -> None:
    sent = _Sent(_tensors(), BLOCK, "digest")
    sent.buffers[0] = sent.buffers[2]
    reception = _reception(LoadPlan.of_whole(sent.manifest, "a test"), "device", 0)
    with pytest.raises(CorruptTransfer, match=r"'a\.weight'"):
        _receive(sent, reception)
    assert int(digest(sent.buffers[0])[0]) != int(sent.buffers[1].view(torch.int64)[0])


def test_a_bucket_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _Sent(_tensors(), BLOCK, "digest")
    reception = _reception(LoadPlan.of_whole(sent.manifest, "a test"), "device", 0)
    monkeypatch.setattr(sent, "wait", lambda seconds: sent.taken < 20)
    with pytest.raises(Timeout, match="buckets"):
        _receive(sent, reception, seconds=0.2)


def test_a_failure_elsewhere_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _Sent(_tensors(), BLOCK, "digest")
    reception = _reception(LoadPlan.of_whole(sent.manifest, "a test"), "device", 0)
    monkeypatch.setattr(sent, "wait", lambda seconds: False)

    def watch() -> None:
        raise TransportError("It has failed elsewhere", cure="none")

    with pytest.raises(TransportError, match="elsewhere"):
        _receive(sent, reception, watch)


def test_nothing_but_empty_tensors() -> None:
    tensors = {"empty": torch.zeros(0, 7)}
    manifest = Manifest(tuple(meta_of(n, t) for n, t in tensors.items()))
    schedule = Schedule.of_one(bucketing(manifest, BLOCK, "digest", CPU))
    reception = _reception(LoadPlan.of_whole(manifest, "a test"), "device", 0)
    receiving = Receiving(schedule, reception, torch.zeros(1, dtype=torch.uint8), CPU)
    given: list[Any] = []
    receiving.run(None, given.extend, Deadline(30), lambda: None)
    assert [(name, tuple(tensor.shape)) for name, tensor in given] == [("empty", (0, 7))]
