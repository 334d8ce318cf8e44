"""Tensors that must be made first: bucket by bucket, with readers that are slow, stall or die."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import CorruptTransfer, InvalidInfo, ManifestMismatch, Timeout
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.slices import sliced
from vllm_wt.loading.staging import Staging
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt.packing import DTYPES, as_bytes, meta_of, view_as
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.pull.exposure import Exposure
from vllm_wt.pull.itinerary import ARENA, DIGESTS, SIGNALS, Itinerary
from vllm_wt.source import StateDictSource, WeightSource

from .conftest import MemoryTransport


class Made(WeightSource):
    """Makes each tensor anew in each pass; counts those that are alive."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.seed = 0
        self.walks = 0
        self.fail_at: int | None = None

    def value(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return torch.randn(self.shapes[index], generator=generator).to(self.dtype)

    def manifest(self) -> Manifest:
        metas = [
            TensorMeta(f"t{index}", str(self.dtype).removeprefix("torch."), shape)
            for index, shape in enumerate(self.shapes)
        ]
        return Manifest(tuple(metas))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(len(self.shapes)):
            if index == self.fail_at:
                raise ZeroDivisionError("odd")
            yield f"t{index}", self.value(index)
        self.walks += 1

    @property
    def made(self) -> frozenset[str]:
        return frozenset(f"t{index}" for index in range(len(self.shapes)))


class Reader:
    """A worker's engine, received on a thread."""

    def __init__(self, transport_cls: type[MemoryTransport], trainer: PullTrainer) -> None:
        context = WorkerContext(backend="memory", device=torch.device("cpu"), rank=0, size=1)
        self.engine = PullEngine(context, transport_cls)
        self.engine.init_transfer_engine(trainer.describe(Deadline(30)))
        self.trainer = trainer
        self.received: dict[str, torch.Tensor] = {}
        self.error: Exception | None = None

    def open(self, seconds: float = 30) -> None:
        info = self.trainer.update_info("open", Deadline(seconds), known=self.trainer.generation)
        staging = Staging(self.trainer.source.manifest())
        self.error = None

        def receive() -> None:
            try:
                self.engine.receive_weights(info, staging)
                self.received = {name: tensor.clone() for name, tensor in staging.weights()}
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=receive)
        self.thread.start()

    def close(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def nothing() -> None:
    return None


def made_trainer(transport_cls: Any, source: Any, **options: Any) -> PullTrainer:
    options = {"bucket_nbytes": 2 * BLOCK, **options}
    return PullTrainer(source, backend="memory", transport_cls=transport_cls, **options)


SHAPES = [(700,), (5000,), (), (0, 3), (1,), (90, 100), (3,), (17, 33), (20000,)]


@pytest.mark.parametrize("verify", ["digest", "bytes"])
@pytest.mark.parametrize("readers", [1, 3])
def test_made_tensors_arrive(fabric, transport_cls, readers, verify):
    source = Made(SHAPES)
    trainer = made_trainer(transport_cls, source, verify=verify)
    workers = [Reader(transport_cls, trainer) for _ in range(readers)]
    region = next(iter(fabric.exposed.values()))
    held = sum(buffer.numel() for buffer in region)
    for version in range(1, 4):
        source.seed = version
        trainer.publish(version, Deadline(30))
        assert trainer.delivered() == 0
        for worker in workers:
            worker.open()
        trainer.send(readers, Deadline(30), nothing)
        trainer.settle()
        for worker in workers:
            worker.close()
            assert {n: t.tolist() for n, t in worker.received.items()} == {
                f"t{i}": source.value(i).tolist() for i in range(len(SHAPES))
            }
        assert trainer.delivered() == readers
    assert source.walks == 3
    assert list(fabric.exposed) == [(f"trainer-{trainer._session[:12]}", 1)]
    assert sum(buffer.numel() for buffer in region) == held
    assert held < 3 * 2 * BLOCK + 2 * BLOCK  # three slots, and digests


def test_some_are_read_in_place_and_some_come_through_the_ring(fabric, transport_cls):
    state = {
        "plain": torch.randn(3000),
        "turned": torch.randn(50, 60).t(),
        "empty": torch.zeros(0),
        "odd": torch.randn(4001)[1::2],
        "byte": torch.tensor(7, dtype=torch.uint8),
        "conjugated": torch.randn(30, dtype=torch.complex64).conj(),
    }
    trainer = made_trainer(transport_cls, StateDictSource(state))
    worker = Reader(transport_cls, trainer)
    assert worker.engine._itinerary is not None
    assert worker.engine._itinerary.exposure.packed == {"turned", "odd", "conjugated"}
    for version in (1, 2):
        state["turned"].add_(1)
        state["plain"].mul_(2)
        trainer.publish(version, Deadline(30))
        worker.open()
        trainer.send(1, Deadline(30), nothing)
        worker.close()
        for name, tensor in state.items():
            assert torch.equal(worker.received[name], tensor)


def test_a_slot_is_not_used_again_before_all_have_read_it(fabric, transport_cls):
    """The trainer goes ahead by the ring, and no further."""
    source = Made([(BLOCK,)] * 20)  # 16 KiB each: two buckets
    trainer = made_trainer(transport_cls, source)
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    seen = []

    def watch() -> None:
        seen.append(trainer._signals.tolist()[1])
        if len(seen) == 3:
            worker.open()

    trainer.send(1, Deadline(30), watch)
    worker.close()
    first = trainer._settled.number(trainer._ticket, 0)
    assert set(seen[:3]) == {first + 2}  # three of forty were ready when nobody read
    assert torch.equal(worker.received["t19"], source.value(19))


def test_a_reader_that_stalls_ends_the_send_and_the_pass_is_walked_to_its_end(
    fabric, transport_cls
):
    source = Made([(BLOCK,)] * 10)
    trainer = made_trainer(transport_cls, source)
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    fabric.hold = True
    worker.open(0.2)
    with pytest.raises(Timeout, match="have not read what is before this in time") as error:
        trainer.send(1, Deadline(0.2), nothing)
    assert error.value.where == "bucket 3 of 20"
    assert error.value.got == "0 of 1 workers"
    assert source.walks == 0
    trainer.settle()
    trainer.settle()
    assert source.walks == 1
    fabric.hold = False
    with pytest.raises(Timeout):
        worker.close()
    trainer.publish(2, Deadline(30))
    worker.open()
    trainer.send(1, Deadline(30), nothing)
    worker.close()
    assert torch.equal(worker.received["t9"], source.value(9))
    trainer.settle()
    assert source.walks == 2


def test_a_round_that_fails_before_the_send_is_walked_all_the_same(transport_cls, fabric):
    source = Made([(BLOCK,)] * 4)
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    trainer.settle()
    assert source.walks == 1


def test_what_watch_raises_ends_the_send(transport_cls, fabric):
    source = Made([(BLOCK,)] * 10)
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))

    def watch() -> None:
        raise Timeout("gone")

    with pytest.raises(Timeout, match="gone"):
        trainer.send(1, Deadline(30), watch)


def test_a_source_that_fails_on_the_way(transport_cls, fabric):
    source = Made([(BLOCK,)] * 10)
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    source.fail_at = 1
    trainer.publish(1, Deadline(30))
    with pytest.raises(ZeroDivisionError):
        trainer.send(1, Deadline(30), nothing)


class Alive(Made):
    """Counts the tensors of a pass that are there as one is made, with that one."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__(shapes)
        self.refs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def value(self, index: int) -> torch.Tensor:
        tensor = super().value(index)
        self.refs.append(weakref.ref(tensor))
        self.most = max(self.most, sum(ref() is not None for ref in self.refs))
        return tensor


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "only walked"])
def test_a_tensor_is_gone_before_the_next_one_is_made(transport_cls, fabric, sent):
    source = Alive([(BLOCK,), (3,), (BLOCK,), (5, 0), (7,)])
    trainer = made_trainer(transport_cls, source)
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    if sent:
        worker.open()
        trainer.send(1, Deadline(30), nothing)
        worker.close()
    trainer.settle()
    assert (source.walks, source.most) == (1, 1)


def test_empty_tensors_may_be_put_where_they_stand_in_the_manifest(transport_cls, fabric):
    source = Made([(0, 2), (3,), (0,), (4,), (0, 5)])
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    for version, order in enumerate(([0, 1, 2, 3, 4], [1, 3], [0, 1, 3, 4]), start=1):
        trainer.publish(version, Deadline(30))
        sender = trainer.sender(1, Deadline(30), nothing)
        for index in order:
            sender.put(f"t{index}", source.value(index))
        sender.end()
    trainer.publish(4, Deadline(30))
    sender = trainer.sender(1, Deadline(30), nothing)
    sender.put("t1", source.value(1))
    with pytest.raises(ManifestMismatch, match="differ from the manifest") as error:
        sender.put("t0", source.value(0))
    assert error.value.expected == "t3 float32 [4]"


@pytest.mark.parametrize("what", ["order", "form", "missing", "more"])
def test_what_is_sent_is_held_against_the_manifest(transport_cls, fabric, what):
    source = Made([(3,), (4,)])
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    sender = trainer.sender(1, Deadline(30), nothing)

    def send() -> None:
        if what == "order":
            sender.put("t1", source.value(1))
        elif what == "form":
            sender.put("t0", source.value(0).double())
        elif what == "missing":
            sender.put("t0", source.value(0))
            sender.end()
        else:
            for index in (0, 1, 1):
                sender.put(f"t{index}", source.value(index))

    with pytest.raises(ManifestMismatch, match="differ from the manifest"):
        send()


def test_readers_must_be_known_where_slots_are_used_again(transport_cls, fabric):
    trainer = made_trainer(transport_cls, Made([(BLOCK,)] * 10))
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    with pytest.raises(InvalidInfo, match="does not say how many workers"):
        trainer.send(None, Deadline(30), nothing)


def test_a_tensor_that_is_not_in_full_any_more(transport_cls, fabric):
    class Sometimes(StateDictSource):
        def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(list(super().at_hand())[self.first :])

    source = Sometimes({"a": torch.ones(3), "b": torch.ones(3)})
    source.first = 0
    trainer = made_trainer(transport_cls, source)
    trainer.describe(Deadline(30))
    source.first = 1
    with pytest.raises(ManifestMismatch, match="'a' was there in full when the session began"):
        trainer.publish(1, Deadline(30))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("verify", "sha"),
        ("verify", True),
        ("staging", "disk"),
        ("staging", None),
        ("bucket_nbytes", 0),
        ("bucket_nbytes", 4095),
        ("bucket_nbytes", -4096),
        ("bucket_nbytes", 4096.0),
        ("bucket_nbytes", True),
    ],
)
def test_wrong_options(transport_cls, fabric, option, value):
    with pytest.raises(InvalidInfo) as error:
        PullTrainer(
            StateDictSource({"a": torch.ones(3)}),
            backend="memory",
            transport_cls=transport_cls,
            **{option: value},
        )
    assert error.value.where == option


DTYPE_NAMES = sorted(name for name in ITEMSIZE if name in DTYPES)


@st.composite
def exposures(draw: Any) -> tuple[Exposure, list[bytes]]:
    metas = [
        TensorMeta(f"t{n}", draw(st.sampled_from(DTYPE_NAMES)), (draw(st.integers(0, 12000)),))
        for n in range(draw(st.integers(1, 6)))
    ]
    packed = frozenset(meta.name for meta in metas if draw(st.booleans()))
    return Exposure(
        Manifest(tuple(metas)),
        packed,
        BLOCK * draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(
    exposure=exposures(),
    cut=st.integers(1, 6),
    chunk=st.integers(1, 3),
    most=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_itinerary_brings_every_byte(exposure, cut, chunk, most, seed):
    """Made by hand, buffer by buffer: what an owner would have at each stop."""
    metas = exposure.manifest.tensors
    generator = torch.Generator().manual_seed(seed)
    values = {
        meta.name: torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
        for meta in metas
    }
    slices = sliced(LoadPlan.of_whole(exposure.manifest, "all of it"))
    names = [meta.name for meta in metas]
    batches = [names[first : first + cut] for first in range(0, len(names), cut)]
    way = Itinerary(
        exposure,
        slices,
        batches,
        owner="owner",
        chunk_nbytes=chunk * BLOCK,
        most=most,
        alignment=1,
    )
    buckets = {}
    if exposure.buckets is not None:
        for number in range(exposure.count):
            buckets[number] = torch.zeros(exposure.slot_nbytes, dtype=torch.uint8)
        for slot in exposure.buckets.layout.slots:
            for piece in exposure.buckets.pieces(slot.tensor.name):
                part = values[slot.tensor.name][piece.tensor_offset :][: piece.nbytes]
                buckets[piece.bucket][piece.offset : piece.offset + piece.nbytes] = part
    stops = []
    for batch in way.batches:
        arena = torch.zeros(way.arena_nbytes, dtype=torch.uint8)
        for stop in batch.stops:
            stops += [stop.bucket] if stop.bucket is not None else []
            for part in stop.chunks:
                assert part.nbytes <= max(chunk, 1) * BLOCK
                assert len(part.copies) <= most
                for copy in part.copies:
                    if copy.target != ARENA:
                        if copy.target == SIGNALS:
                            assert (copy.source, copy.nbytes) == (exposure.signals, 24)
                            continue
                        assert (copy.target, copy.source) == (DIGESTS, exposure.digests)
                        first, count = exposure.digests_of(stop.bucket)
                        assert (copy.source_offset, copy.nbytes) == (8 * first, 8 * count)
                        continue
                    if stop.bucket is None:
                        source = values[exposure.in_place[copy.source].name]
                    else:
                        assert copy.source == exposure.slot(stop.bucket)
                        source = buckets[stop.bucket]
                    data = source[copy.source_offset : copy.source_offset + copy.nbytes]
                    assert data.numel() == copy.nbytes
                    assert part.start <= copy.target_offset
                    assert copy.target_offset + copy.nbytes <= part.end
                    arena[copy.target_offset : copy.target_offset + copy.nbytes] = data
        for slot in batch.layout.slots:
            got = arena[slot.offset : slot.offset + slot.nbytes]
            assert torch.equal(got, values[slot.tensor.name])
            assert as_bytes(view_as(got.clone(), slot.tensor)).numel() == slot.nbytes
    assert stops == sorted(stops)


def test_meta_of_a_made_tensor_is_that_of_the_manifest():
    source = Made(SHAPES, torch.bfloat16)
    assert [meta_of(n, t) for n, t in source] == list(source.manifest().tensors)


class Gathered(StateDictSource):
    """What is there in full, and not to be read where it is: FSDP2 takes its memory away later."""

    @property
    def made(self) -> frozenset[str]:
        return frozenset(self._state)


def test_tensors_that_are_there_are_copied_as_one(fabric, transport_cls, monkeypatch):
    state = {f"t{n}": torch.randn(shape) for n, shape in enumerate(SHAPES)}
    trainer = made_trainer(transport_cls, Gathered(state))
    worker = Reader(transport_cls, trainer)
    for version in range(1, 5):
        if version == 3:
            state["t1"] = torch.randn(5000)
        else:
            state["t1"].mul_(2)
        prepared = trainer._pouring._prepared
        trainer.publish(version, Deadline(30))
        assert (trainer._pouring._prepared is prepared) == (version in {2, 4})
        worker.open()
        trainer.send(1, Deadline(30), nothing)
        worker.close()
        assert {n: t.tolist() for n, t in worker.received.items()} == {
            n: t.tolist() for n, t in state.items()
        }


@pytest.mark.parametrize("what", ["write", "free"])
def test_what_is_copied_must_stay_as_it_is(fabric, transport_cls, what):
    state = {"a": torch.randn(500)}
    trainer = made_trainer(transport_cls, Gathered(state))
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    if what == "write":
        trainer.send(1, Deadline(30), nothing)
        state["a"].add_(1)
        with pytest.raises(ManifestMismatch, match="written to while"):
            trainer.update_info("seal", Deadline(30), known=1)
    else:
        state["a"].untyped_storage().resize_(0)
        with pytest.raises(ManifestMismatch, match="freed or resized while"):
            trainer.send(1, Deadline(30), nothing)


def test_a_source_whose_tensors_are_not_what_it_says(fabric, transport_cls):
    class Lies(WeightSource):
        def manifest(self) -> Manifest:
            return Manifest((TensorMeta("a", "bfloat16", (4,)),))

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.ones(4, dtype=torch.float16)

    trainer = made_trainer(transport_cls, Lies())
    with pytest.raises(ManifestMismatch, match="is not what the source's manifest says") as error:
        trainer.describe(Deadline(30))
    assert (error.value.expected, error.value.got) == ("bfloat16 [4]", "float16 [4]")


def test_one_element_of_any_stride(fabric, transport_cls):
    state = {"scale": torch.randn(5, 3)[2:3, 1], "w": torch.ones(5)}
    assert state["scale"].is_contiguous()
    assert state["scale"].stride() == (3,)
    trainer = made_trainer(transport_cls, StateDictSource(state))
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    worker.open()
    trainer.send(1, Deadline(30), nothing)
    worker.close()
    assert torch.equal(worker.received["scale"], state["scale"])


def test_a_slot_that_was_used_again_too_early_is_seen(fabric, transport_cls):
    """By a trainer that knows of fewer readers than there are."""
    source = Made([(BLOCK,)] * 12)
    trainer = made_trainer(transport_cls, source, verify="bytes")
    first, late = Reader(transport_cls, trainer), Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    first.open()
    trainer.send(1, Deadline(30), nothing)
    first.close()
    late.open()
    with pytest.raises(CorruptTransfer, match="used a bucket again before"):
        late.close()


def test_a_quarantined_transport_is_closed_in_the_end(fabric, transport_cls):
    trainer = made_trainer(transport_cls, StateDictSource({"a": torch.ones(300)}))
    worker = Reader(transport_cls, trainer)
    held = fabric.endpoints[-1]
    trainer.publish(1, Deadline(30))
    trainer.send(1, Deadline(30), nothing)
    fabric.hold, fabric.quiesces = True, False
    worker.open(0.1)
    with pytest.raises(Timeout):
        worker.close()
    assert not held.closed
    fabric.hold, fabric.quiesces = False, True
    worker.engine.shutdown()
    assert held.closed
    assert worker.engine._quarantine == []
