"""Several senders' buckets, in one order: nothing is lost in it, and nobody waits for himself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.errors import CorruptTransfer
from vllm_wt.info import Staging, Verify
from vllm_wt.loading import reception as receptions
from vllm_wt.loading.arena import Arena
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.reception import Reception
from vllm_wt.loading.recorder import record
from vllm_wt.loading.slices import sliced
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt.packing import as_bytes, meta_of
from vllm_wt.pull.ring import Filling, Ring
from vllm_wt_nccl.bucketing import scheduled
from vllm_wt_nccl.cutting import Cuts
from vllm_wt_nccl.receiving import Receiving, arena_nbytes, is_whole
from vllm_wt_nccl.schedule import Schedule, Turn

CPU = torch.device("cpu")


def _random_cuts(generator: random.Random, senders: int, sizes: int = 20) -> Cuts:
    """Tensors of which each is sent by one rank, or by several."""
    metas, kinds = [], []
    for number in range(sizes):
        dtype = generator.choice(["float32", "bfloat16", "uint8"])
        numel = generator.choice([0, 1, 3, 500, 3000, 9000])
        among = generator.sample(range(senders), generator.randint(1, senders))
        ends = sorted({*(generator.randint(1, numel) for _ in among[1:]), numel} if numel else ())
        parts = zip(among, (b - a for a, b in pairwise([0, *ends])), strict=False)
        metas.append(TensorMeta(f"w{number}.weight", dtype, (numel,)))
        kinds.append(tuple((rank, count * ITEMSIZE[dtype]) for rank, count in parts))
    manifest = Manifest(tuple(metas))
    return Cuts.checked(manifest, senders, tuple(kinds), tuple(range(sizes)))


def _values(manifest: Manifest, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for meta in manifest.tensors:
        data = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
        found[meta.name] = data.view(getattr(torch, meta.dtype)).view(meta.shape)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_each_byte_comes_once(seed: int) -> None:
    generator = random.Random(seed)
    senders = generator.randint(2, 5)
    schedule = scheduled(_random_cuts(generator, senders), BLOCK, "digest", CPU)
    assert sorted(schedule.turns) == [
        Turn(sender, bucket)
        for sender, stream in enumerate(schedule.streams)
        for bucket in range(stream.count)
    ]
    for sender in schedule.senders:  # each in its own order
        buckets = [turn.bucket for turn in schedule.turns if turn.sender == sender]
        assert buckets == sorted(buckets)
    used: dict[int, list[tuple[int, int]]] = {}
    for meta in schedule.cuts.manifest.tensors:
        at = 0
        for piece in schedule.pieces(meta.name):
            assert piece.tensor_offset == at
            at += piece.nbytes
            assert piece.offset + piece.nbytes <= schedule.blocks(piece.bucket) * BLOCK
            used.setdefault(piece.bucket, []).append((piece.offset, piece.offset + piece.nbytes))
        assert at == meta.nbytes
    for ranges in used.values():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    assert len(used) == schedule.count


def test_senders_alternate() -> None:
    """Ranks of which each has a third of every tensor take turns, within a large tensor too."""
    metas = [TensorMeta("small", "uint8", (3000,)), TensorMeta("large", "uint8", (90_000,))]
    kinds = tuple(tuple((rank, meta.nbytes // 3) for rank in range(3)) for meta in metas)
    cuts = Cuts.checked(Manifest(tuple(metas)), 3, kinds, (0, 1))
    turns = scheduled(cuts, BLOCK, "digest", CPU).turns
    assert [turn.sender for turn in turns] == [0, 1, 2] * (len(turns) // 3)


class _Sent:
    """What each sender has broadcast, taken by one worker."""

    def __init__(self, schedule: Schedule, full: dict[str, torch.Tensor]) -> None:
        self.buffers: list[list[torch.Tensor]] = [[] for _ in schedule.streams]
        for sender, stream in enumerate(schedule.streams):
            if stream.count:
                self._send(schedule, sender, full)

    def _send(self, schedule: Schedule, sender: int, full: dict[str, torch.Tensor]) -> None:
        stream = schedule.streams[sender]
        ring = Ring(stream, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        digests = torch.zeros(stream.blocks, dtype=torch.int64)

        def ready(bucket: int) -> None:
            first, count = stream.digests_of(bucket)
            self.buffers[sender].append(ring.slot(bucket)[: count * BLOCK].clone())
            if stream.digested:
                self.buffers[sender].append(as_bytes(digests[first : first + count]).clone())

        filling = Filling(
            ring,
            digests if stream.digested else None,
            readers=1,
            have_read=lambda _: 1,
            ready=ready,
            watch=lambda: None,
            deadline=Deadline(30),
        )
        for name, segments in schedule.cuts.of.items():
            for owner, offset, nbytes in segments:
                if owner == sender:
                    part = as_bytes(full[name])[offset : offset + nbytes]
                    filling.put(name, part.clone().view(full[name].dtype))
        filling.end()

    def broadcast(self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0) -> _Sent:
        for buffer in buffers:
            buffer.copy_(self.buffers[root].pop(0))
        return self

    def wait(self, seconds: float) -> bool:
        return True

    def close(self) -> bool:
        return True


def _plan(manifest: Manifest) -> LoadPlan:
    """Of a model in which each tensor is a module's own, and can be loaded by itself."""
    model = torch.nn.Module()
    for meta in manifest.tensors:
        module = torch.nn.Module()
        data = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))
        module.weight = torch.nn.Parameter(data, requires_grad=False)
        model.add_module(meta.name.partition(".")[0], module)

    def load(weights: Any) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)

    return record(model, load, manifest)


def _received(
    schedule: Schedule, sent: _Sent, staging: Staging = "device"
) -> dict[str, torch.Tensor]:
    plan = _plan(schedule.cuts.manifest)
    reception = Reception.planned(plan, sliced(plan, 0), Arena(CPU), staging, host=True)
    if staging == "none":
        assert len(reception.parts) > 3
    in_place = len(schedule.streams) == 1 and staging == "device"
    assert is_whole(reception, schedule) == in_place
    arena = torch.full((arena_nbytes(reception, schedule),), 0xAA, dtype=torch.uint8)
    receiving = Receiving(schedule, reception, arena, CPU)
    found: dict[str, torch.Tensor] = {}

    def load(weights: Any) -> None:
        found.update((name, tensor.clone()) for name, tensor in weights)

    receiving.run(sent, load, Deadline(30), lambda: None)
    return found


@pytest.mark.parametrize("verify", ["digest", "bytes"])
@pytest.mark.parametrize("bucket", [BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("senders", [1, 2, 4])
@pytest.mark.parametrize("staging", ["device", "none"])
def test_what_comes_is_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, senders: int, bucket: int, verify: Verify, staging: Staging
) -> None:
    """In parts, too, of which one takes the other's place in memory."""
    monkeypatch.setattr(receptions, "STREAMED_NBYTES", 1)
    cuts = _random_cuts(random.Random(senders), senders)
    schedule = scheduled(cuts, bucket, verify, CPU)
    full = _values(cuts.manifest, 1)
    sent = _Sent(schedule, full)
    found = _received(schedule, sent, staging)
    assert list(found) == list(full)
    for name, tensor in full.items():
        assert meta_of(name, found[name]) == meta_of(name, tensor)
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name
    assert not any(sent.buffers)


def test_a_byte_that_is_wrong_is_seen() -> None:
    cuts = _random_cuts(random.Random(3), 3)
    schedule = scheduled(cuts, BLOCK, "digest", CPU)
    name = max(cuts.of, key=lambda each: len(cuts.of[each]))
    piece = schedule.pieces(name)[-1]
    sender, bucket = schedule.turns[piece.bucket]
    sent = _Sent(schedule, _values(cuts.manifest, 1))
    sent.buffers[sender][2 * bucket][piece.offset] ^= 1
    with pytest.raises(CorruptTransfer):
        _received(schedule, sent)


# -- nobody waits for himself ------------------------------------------------------------------------


def _rank(
    schedule: Schedule, sender: int, gathered: set[int], taken: Callable[[Turn], bool]
) -> Iterator[Any]:
    """What a rank does in a push: yields what it waits for, until that has come; and what it sends."""
    stream = schedule.streams[sender]
    current = -1
    slots = max(1, min(stream.slots, stream.count))
    for index, tensor in enumerate(stream.manifest.tensors):
        if index in gathered:
            yield ("gather", index)
        assert stream.buckets is not None or not tensor.nbytes
        pieces = stream.buckets.pieces(tensor.name) if stream.buckets and tensor.nbytes else ()
        for piece in pieces:
            if piece.bucket != current:
                if current >= 0:
                    yield ("send", Turn(sender, current))
                while piece.bucket >= slots and not taken(Turn(sender, piece.bucket - slots)):
                    yield ("full", None)
                current = piece.bucket
    if current >= 0:
        yield ("send", Turn(sender, current))


def _ends(schedule: Schedule, order: Sequence[Turn], gathered: set[int], seed: int) -> bool:
    """Whether all comes to its end where the workers take buckets in this order."""
    generator = random.Random(seed)
    sent: set[Turn] = set()
    done = 0

    def taken(turn: Turn) -> bool:
        return turn in order[:done]

    ranks = {n: _rank(schedule, n, gathered, taken) for n in range(len(schedule.streams))}
    state: dict[int, Any] = dict.fromkeys(ranks, ("go", None))
    while True:
        moves: list[Any] = [n for n, (what, _) in state.items() if what in {"go", "full"}]
        waiting = [what for what in state.values() if what[0] == "gather"]
        if len(waiting) == len(ranks) and len(set(waiting)) == 1:  # all have come
            moves = list(ranks)
        before = (done, dict(state), len(sent))
        generator.shuffle(moves)
        for number in moves:
            state[number] = next(ranks[number], ("end", None))
            if state[number][0] == "send":
                sent.add(state[number][1])
                state[number] = ("go", None)
        while done < len(order) and order[done] in sent:
            done += 1
        if all(what == "end" for what, _ in state.values()):
            return done == len(order)
        if (done, state, len(sent)) == before:
            return False


def _gathered_cuts(generator: random.Random, senders: int) -> tuple[Cuts, set[int]]:
    """Those that are gathered are sent by one rank; the others by all."""
    cuts = _random_cuts(generator, senders, 30)
    kinds = list(cuts.kinds)
    gathered = {n for n in range(30) if kinds[n] and generator.random() < 0.5}
    for number in gathered:
        nbytes = sum(n for _, n in kinds[number])
        kinds[number] = ((generator.randrange(senders), nbytes),)
    return Cuts.checked(cuts.manifest, senders, tuple(kinds), cuts.kind_of), gathered


def _narrow(schedule: Schedule) -> Schedule:
    """With one buffer for each sender, in which waits are many."""
    streams = tuple(replace(stream, slots=1) for stream in schedule.streams)
    return replace(schedule, streams=streams)


@pytest.mark.parametrize("narrow", [False, True])
def test_B15_every_order_of_events_comes_to_its_end(narrow: bool) -> None:
    others = 0
    for seed in range(150):
        generator = random.Random(seed)
        cuts, gathered = _gathered_cuts(generator, generator.randint(2, 5))
        schedule = scheduled(cuts, BLOCK, "digest", CPU)
        if narrow:
            schedule = _narrow(schedule)
        assert _ends(schedule, schedule.turns, gathered, seed), seed
        by_number = sorted(schedule.turns, key=lambda turn: (turn.bucket, turn.sender))
        others += not _ends(schedule, by_number, gathered, seed)
    assert others or not narrow, "another order would do as well, so this test shows nothing"
