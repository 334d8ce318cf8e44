"""Weights that workers load from where the trainer has them, over a fabric that maps."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    ManifestMismatch,
    NotPaused,
    PeerDead,
    Timeout,
    TornModel,
    TransportError,
)
from vllm_wt.info import PullInitInfo
from vllm_wt.loading.apply import Kept
from vllm_wt.packing import DTYPES
from vllm_wt.pull import PullTrainer
from vllm_wt.source import StateDictSource

from .conftest import DictLoader
from .support.engines import (
    InProcessEngine,
    PausingEngine,
    RoundEngine,
    Weights,
    assert_equal,
    connecting,
)
from .test_pull import COLUMNS, ROWS, Columns


class KeepingLoader(DictLoader):
    """Keeps what it was given itself, too; ``during`` runs within a commit, after the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.handed = None
        self.numbers = []
        self.batches = None
        self.during = lambda: None

    def use(self, plan, batches=None):
        super().use(plan, batches)
        self.batches = batches

    def apply(self, weights):
        self.handed = weights
        super().apply(weights)
        self.during()

    def apply_batch(self, number, weights, *, looked=False):
        self.numbers.append(number)
        self.apply(weights)


@pytest.fixture
def loader():
    return KeepingLoader()


@pytest.fixture(params=[InProcessEngine, RoundEngine], ids=["in phases", "in one call"])
def engine(request, mapping_cls, loader):
    return _shut_down_later(request, request.param(mapping_cls, loader))


@pytest.fixture
def phased(request, mapping_cls, loader):
    return _shut_down_later(request, InProcessEngine(mapping_cls, loader))


@pytest.fixture
def round_engine(request, mapping_cls, loader):
    return _shut_down_later(request, RoundEngine(mapping_cls, loader))


def _shut_down_later(request, engine):
    request.addfinalizer(engine.engine.shutdown)
    return engine


@pytest.fixture
def connect(monkeypatch, mapping_cls):
    """``connect(engine, source, **options of the trainer)``."""
    stacks = []

    def connect(engines, source, **options):
        stack = connecting(monkeypatch, mapping_cls, partial(PullTrainer, **options))
        stacks.append(stack)
        return stack.__enter__()(engines, source)

    yield connect
    for stack in stacks:
        stack.__exit__(None, None, None)


@pytest.fixture
def source():
    return Weights(a=torch.arange(12.0), b=torch.ones(3, dtype=torch.bfloat16))


def of_every_form():
    """Each dtype, tensors of several digests, without elements and without dimensions."""
    generator = torch.Generator().manual_seed(5)
    state = {"large": torch.randn(70, 90, generator=generator)}
    for name, dtype in DTYPES.items():
        nbytes = 6 * torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        data = data % 2 if dtype is torch.bool else data
        state[name] = data.view(dtype).view(2, 3)
        state[f"empty {name}"] = torch.empty(0, 4, dtype=dtype)
    return state | {"scalar": torch.tensor(2.5), "truth": torch.tensor(True)}


def places(weights):
    return {name: tensor.data_ptr() for name, tensor in weights if tensor.numel()}


def eventually(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it has not come true in time"
        time.sleep(0.001)


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "vllm-wt-mapped"]


def sealed(sync, engine, version):
    """A round up to its seal, by hand."""
    trainer = sync._trainer
    trainer.publish(version, Deadline(30))
    engine.round.start()
    engine.round.update(info(trainer, "open"))
    trainer.send(1, Deadline(30), lambda: None)
    engine.round.update(info(trainer, "seal"))


def info(trainer, op):
    return trainer.update_info(op, Deadline(30), known=trainer.generation).to_wire()


# -- what is handed over ---------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["digest", "bytes", "off"])
def test_the_model_gets_the_trainers_own_memory(connect, engine, loader, mapping_fabric, verify):
    mapping_fabric.fail_submit = AssertionError("nothing is to be received")
    state = of_every_form()
    sync = connect(engine, state, verify=verify)
    handed = None
    for version in range(1, 4):
        state["large"].add_(version)
        state["scalar"].mul_(2)
        sync.push(version)
        assert_equal(loader.weights, state)
        assert places(loader.handed) == places(state.items())
        assert isinstance(loader.handed, Kept)
        assert handed in (None, loader.handed)
        assert handed is None or handed is loader.handed
        handed = loader.handed
    facts = engine.engine.report()
    assert facts["staging"] == "mapped"
    assert (facts["arena_nbytes"], facts["needed_nbytes"]) == (0, 0)
    trainer, reader = mapping_fabric.endpoints
    assert (trainer.registrations, reader.registrations) == (1, 0)
    assert list(mapping_fabric.exposed) == [(trainer.name, 1)]


def test_only_empty_tensors(connect, engine, loader):
    state = {"a": torch.empty(0), "b": torch.empty(3, 0, dtype=torch.int8)}
    sync = connect(engine, state)
    for version in (1, 2):
        sync.push(version)
        assert_equal(loader.weights, state)


def test_nothing_is_allocated_for_what_can_be_exposed(connect, engine, mapping_fabric, source):
    sync = connect(engine, source)
    own = len(mapping_fabric.allocated)
    assert {tensor.numel() for tensor in mapping_fabric.allocated} == {2 * 8, 3 * 8}
    sync.push(1)
    sync.push(2)
    assert len(mapping_fabric.allocated) == own


# -- what cannot be exposed where it is ------------------------------------------------------------


def blocks_of(fabric):
    """What was allocated besides digests and signals, which are int64 words."""
    return [t for t in fabric.allocated if t.numel() > 8 * 16]


@pytest.mark.parametrize("which", ["all", "some"])
def test_what_cannot_be_exposed_is_copied_once_a_round(
    connect, engine, loader, mapping_fabric, which
):
    state = {name: torch.randn(40 + n) for n, name in enumerate("abcd")}
    copied = set(state) if which == "all" else {"a", "c"}
    mine = {state[name].data_ptr() for name in copied}
    mapping_fabric.exposable = lambda tensor: tensor.data_ptr() not in mine
    sync = connect(engine, state)
    handed = None
    for version in range(1, 4):
        for tensor in state.values():
            tensor.add_(version)
        sync.push(version)
        assert_equal(loader.weights, state)
        there = places(loader.handed)
        assert {n for n, t in state.items() if there[n] == t.data_ptr()} == set(state) - copied
        (block,) = blocks_of(mapping_fabric)
        start, end = block.data_ptr(), block.data_ptr() + block.numel()
        assert all(start <= there[name] < end for name in copied)
        assert handed is None or handed is loader.handed
        handed = loader.handed
    assert mapping_fabric.endpoints[0].registrations == 1


def test_other_tensors_of_the_same_form_are_copied_into_the_same_block(
    connect, engine, loader, mapping_fabric
):
    mapping_fabric.exposable = lambda tensor: False
    state = {"a": torch.randn(50), "b": torch.randn(60)}
    sync = connect(engine, state)
    sync.push(1)
    handed = loader.handed
    state["b"] = torch.randn(60)
    sync.push(2)
    assert_equal(loader.weights, state)
    assert loader.handed is handed
    assert len(blocks_of(mapping_fabric)) == 1


def test_what_is_copied_may_change_once_the_copy_is_made(
    connect, phased, loader, mapping_fabric, source
):
    mapping_fabric.exposable = lambda tensor: False
    sync = connect(phased, source)
    published = {name: tensor.clone() for name, tensor in source.items()}
    loader.during = lambda: source["a"].add_(1)
    sync.push(1)
    assert_equal(loader.weights, published)
    loader.during = lambda: None
    sync.push(2)
    assert_equal(loader.weights, source)


def test_what_can_be_exposed_by_now_is(connect, engine, loader, mapping_fabric, source):
    mapping_fabric.exposable = lambda tensor: False
    sync = connect(engine, source)
    sync.push(1)
    assert places(loader.handed) != places(source.items())
    mapping_fabric.exposable = lambda tensor: True
    source["a"] = source["a"].clone()  # or nobody would look
    sync.push(2)
    assert_equal(loader.weights, source)
    assert places(loader.handed) == places(source.items())


def test_memory_that_was_freed_is_not_copied(connect, engine, loader, mapping_fabric, source):
    mapping_fabric.exposable = lambda tensor: False
    sync = connect(engine, source)
    sync.push(1)
    source["a"].untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match="freed or resized"):
            sync.push(2)
    source["a"].untyped_storage().resize_(48)
    source["a"].fill_(7)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_tensor_that_its_owner_should_see_to(connect, phased, loader, mapping_fabric, source):
    def refuse(tensor):
        raise TransportError("Memory of a pool cannot be exposed")

    mapping_fabric.exposable = refuse
    with pytest.raises(TransportError, match="of a pool"):
        connect(phased, source)


def test_a_tensor_that_its_owner_should_see_to_is_refused_until_he_has(
    connect, engine, loader, mapping_fabric, source
):
    def refuse(tensor):
        raise TransportError("Memory of a pool cannot be exposed")

    sync = connect(engine, source)
    sync.push(1)
    mapping_fabric.exposable = refuse
    source["a"] = torch.full((12,), 5.0)
    for _ in range(2):
        with pytest.raises(TransportError, match="of a pool"):
            sync.push(2)
    mapping_fabric.exposable = lambda tensor: True
    sync.push(2)
    assert_equal(loader.weights, source)


def test_memory_to_copy_to_that_cannot_be_had_is_asked_for_again(
    connect, engine, loader, mapping_fabric, mapping_cls, source, monkeypatch
):
    def refuse(nbytes, device):
        raise TransportError("There is not so much shared memory")

    sync = connect(engine, source)
    sync.push(1)
    mapping_fabric.exposable = lambda tensor: False
    source["a"] = torch.full((12,), 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(mapping_cls, "allocate", refuse)
        for _ in range(2):
            with pytest.raises(TransportError, match="not so much"):
                sync.push(2)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_weights_that_must_be_made_come_through_the_ring(
    connect, engine, loader, mapping_fabric, source
):
    class Made(StateDictSource):
        made = frozenset(["a"])

        def __iter__(self):
            for name, tensor in super().__iter__():
                yield name, tensor.clone()

    sync = connect(engine, Made(source))
    for version in (1, 2):
        source["a"].add_(1)
        sync.push(version)
        assert_equal(loader.weights, source)
    assert not sync._trainer.at_once
    assert engine.engine.report()["staging"] == "device"
    assert "round" not in engine.calls
    slots = {slot.data_ptr() for slot in sync._trainer._ring.slots}
    assert slots <= {tensor.data_ptr() for tensor in mapping_fabric.allocated}


def test_strided_tensors_come_through_the_ring(connect, engine, loader, source):
    state = source | {"turned": torch.randn(5, 6).t()}
    sync = connect(engine, state)
    for version in (1, 2):
        state["turned"].mul_(2)
        sync.push(version)
        assert_equal(loader.weights, state)
    assert engine.engine.report()["staging"] == "device"


# -- what is verified ------------------------------------------------------------------------------


def tampering(number):
    """Readers find other bytes in one buffer than its owner has."""

    def mapped(buffers):
        found = list(buffers)
        found[number] = found[number].clone()
        found[number][-1] ^= 1
        return found

    return mapped


def test_memory_that_is_not_the_owners_is_never_loaded(
    connect, engine, loader, mapping_fabric, source
):
    sync = connect(engine, source)
    sync.push(1)
    before = dict(loader.weights)
    mapping_fabric.mapped = tampering(1)
    source["a"] = source["a"] + 1  # so that it is mapped anew
    with pytest.raises(CorruptTransfer, match="Tensor 'b' did not arrive") as error:
        sync.push(2)
    assert error.value.where == "verify"
    assert_equal(loader.weights, before)
    (status,) = sync.status()
    assert (status.version, status.torn) == (1, False)
    mapping_fabric.mapped = list
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("verify", ["bytes", "off"])
def test_without_digests_nothing_is_looked_at(
    connect, engine, loader, mapping_fabric, source, verify
):
    mapping_fabric.mapped = tampering(1)
    connect(engine, source, verify=verify).push(1)
    assert torch.equal(loader.weights["a"], source["a"])
    assert not torch.equal(loader.weights["b"], source["b"])


@pytest.mark.parametrize(("tensor", "right"), [("wide", False), ("other", True)])
def test_what_the_model_does_not_take_is_not_verified(
    connect, mapping_cls, mapping_fabric, tensor, right
):
    columns = Columns(3, 10)
    state = {
        "wide": torch.randn(ROWS, COLUMNS),
        "bias": torch.randn(3),
        "other": torch.randn(20),
    }
    mapping_fabric.mapped = tampering(list(state).index(tensor))
    engine = InProcessEngine(mapping_cls, columns)
    sync = connect(engine, state)
    try:
        if right:
            sync.push(1)
            assert torch.equal(columns.model.weight, state["wide"][:, 3:13])
        else:
            with pytest.raises(CorruptTransfer, match="'wide'"):
                sync.push(1)
            assert not columns.model.weight.any()
    finally:
        engine.engine.shutdown()


@pytest.mark.parametrize(
    ("exposed", "where"),
    [
        (lambda buffers: buffers[:-1], "buffer -1"),
        (lambda buffers: [*buffers, buffers[0]], "buffer -1"),
        (lambda buffers: [], "buffer -1"),
        (lambda buffers: [buffers[0][:-1], *buffers[1:]], "buffer 0"),
        (lambda buffers: [*buffers[:-1], torch.cat([buffers[-1], buffers[-1]])], "buffer 3"),
        (lambda buffers: [buffers[0].to("meta"), *buffers[1:]], "map"),
        (lambda buffers: [*buffers[:-1], buffers[-1].to("meta")], "map"),
    ],
    ids=["fewer", "more", "none", "shorter", "longer", "elsewhere", "signals elsewhere"],
)
def test_an_owner_that_exposes_other_buffers_than_announced(
    connect, phased, mapping_fabric, source, exposed, where
):
    mapping_fabric.mapped = exposed
    with pytest.raises(CorruptTransfer, match="The owner's memory is not") as error:
        connect(phased, source)
    assert error.value.where == where
    assert error.value.cure.startswith("connect")
    assert [endpoint.closed for endpoint in mapping_fabric.endpoints] == [True, True]
    assert watchers() == []


def test_a_trainer_that_calls_a_ring_mapped(connect, phased, monkeypatch, source):
    describe = PullTrainer.describe

    def lie(self, deadline):
        told = describe(self, deadline)
        assert isinstance(told, PullInitInfo)
        assert told.packed
        return type(told)(**{**vars(told), "mapped": True})

    monkeypatch.setattr(PullTrainer, "describe", lie)
    with pytest.raises((CorruptTransfer, InvalidInfo, TransportError)):
        connect(phased, source | {"turned": torch.randn(5, 6).t()})
    assert watchers() == []


# -- a trainer that does not leave it as it is -----------------------------------------------------


def write(state):
    state["a"].add_(1)


def free(state):
    state["a"].untyped_storage().resize_(0)


def replace(state):
    state["a"] = torch.full((12,), 5.0)


def mend(state):
    state["a"].untyped_storage().resize_(48)
    state["a"].fill_(3)


@pytest.mark.parametrize("change", [write, free])
def test_a_change_during_the_commit_is_an_error(connect, engine, loader, source, change):
    sync = connect(engine, source)
    sync.push(1)
    loader.during = lambda: change(source)
    with pytest.raises(ManifestMismatch, match="while the workers were reading") as error:
        sync.push(2)
    assert "push again" in error.value.cure
    assert error.value.engine == "engine0"
    assert (sync._members.links[0].torn, sync._members.links[0].whole) == (True, False)
    loader.during = lambda: None
    mend(source)
    sync.push(3)
    assert_equal(loader.weights, source)
    (status,) = sync.status()
    assert (status.version, status.torn) == (3, False)


@pytest.mark.parametrize("change", [write, free])
def test_an_engine_is_torn_after_a_change_during_its_commit(
    connect, engine, loader, source, change
):
    sync = connect(engine, source)
    sync.push(1)
    loader.during = lambda: change(source)
    with pytest.raises(ManifestMismatch):
        sync.push(2)
    for _ in range(2):
        assert sync.status()[0].torn


def test_an_engine_with_mixed_weights_stays_paused_whoever_asks(
    connect, request, mapping_cls, loader, source
):
    engine = _shut_down_later(request, PausingEngine(mapping_cls, loader))
    sync = connect(engine, source)
    loader.during = lambda: write(source)
    with pytest.raises(ManifestMismatch) as error:
        sync.push(1)
    assert "still paused until a push succeeds: engine0" in error.value.cure
    assert engine.paused
    sync.status()
    sync.close()
    assert engine.paused


def test_a_tensor_that_is_replaced_during_the_commit_harms_nothing(connect, engine, loader, source):
    """What is mapped is held until the next push, which sends the other one."""
    sync = connect(engine, source)
    before = {name: tensor.clone() for name, tensor in source.items()}
    loader.during = lambda: replace(source)
    sync.push(1)
    assert_equal(loader.weights, before)
    loader.during = lambda: None
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("change", [write, free])
def test_a_change_before_the_commit_commits_nothing(
    connect, engine, loader, source, change, monkeypatch
):
    sync = connect(engine, source)
    sync.push(1)
    before, send = dict(loader.weights), sync._trainer.send

    def change_then(*args):
        send(*args)
        change(source)

    with monkeypatch.context() as patch:
        patch.setattr(sync._trainer, "send", change_then)
        with pytest.raises(ManifestMismatch, match="while the workers were reading") as error:
            sync.push(2)
    assert "nothing was committed" in error.value.cure
    assert_equal(loader.weights, before)
    (status,) = sync.status()
    assert (status.version, status.torn) == (1, False)
    mend(source)
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("change", [write, free])
def test_received_elsewhere_a_change_during_the_commit_harms_nothing(
    connect, engine, loader, source, change
):
    """The workers have all of it in memory of their own by then."""
    sync = connect(engine, source, staging="device")
    published = {name: tensor.clone() for name, tensor in source.items()}
    loader.during = lambda: change(source)
    sync.push(1)
    assert_equal(loader.weights, published)


# -- an attempt that the trainer has given up ------------------------------------------------------


def test_given_up_before_the_commit_nothing_is_touched(connect, phased, loader, source):
    sync = connect(phased, source)
    sync.push(1)
    before, loader.handed = dict(loader.weights), None
    sealed(sync, phased, 2)
    sync._trainer.withdraw()
    write(source)
    with pytest.raises(Aborted, match="given this attempt up") as error:
        phased.round.finish()
    assert error.value.cure == "push again"
    assert loader.handed is None
    assert_equal(loader.weights, before)
    assert (phased.round.version, phased.round.torn) == (1, False)
    sync.push(3)
    assert_equal(loader.weights, source)


def test_given_up_before_it_came_nothing_is_handed_over(connect, phased, loader, source):
    sync = connect(phased, source)
    trainer = sync._trainer
    trainer.publish(1, Deadline(30))
    trainer.send(1, Deadline(30), lambda: None)
    wire = info(trainer, "all")
    trainer.withdraw()
    phased.round.start()
    with pytest.raises(Aborted, match="given this attempt up"):
        phased.round.update(wire)
    assert loader.handed is None
    sync.push(2)
    assert_equal(loader.weights, source)


@pytest.mark.parametrize("verify", ["digest", "bytes"])
def test_given_up_before_it_came_nothing_is_streamed(connect, phased, loader, source, verify):
    sync = connect(phased, source, staging="none", verify=verify)
    trainer = sync._trainer
    trainer.publish(1, Deadline(30))
    trainer.send(1, Deadline(30), lambda: None)
    wire = info(trainer, "all") | {"paused": True}
    trainer.withdraw()
    phased.round.start()
    with pytest.raises(Aborted, match="given this attempt up"):
        phased.round.update(wire)
    assert loader.numbers == []
    assert not phased.round.torn


def test_given_up_during_the_commit_the_model_is_torn(connect, phased, loader, source):
    sync = connect(phased, source)
    sync.push(1)
    sealed(sync, phased, 2)
    loader.during = sync._trainer.withdraw
    with pytest.raises(TornModel, match="given this attempt up"):
        phased.round.finish()
    assert phased.round.torn
    assert sync.status()[0].torn
    loader.during = lambda: None
    sync.push(3)
    assert_equal(loader.weights, source)
    (status,) = sync.status()
    assert (status.version, status.torn) == (3, False)


def test_a_push_during_whose_commit_it_is_given_up(connect, engine, loader, source):
    sync = connect(engine, source)
    loader.during = sync._trainer.withdraw
    with pytest.raises(TornModel):
        sync.push(1)
    for _ in range(2):
        assert sync.status()[0].torn
    loader.during = lambda: None
    sync.push(1)
    assert_equal(loader.weights, source)


def test_a_round_that_has_ended_well_is_no_longer_given_up(connect, phased, source):
    """What a worker has committed is what the trainer had; what comes of it later is no news."""
    sync = connect(phased, source)
    sync.push(1)
    assert sync._trainer._signals.tolist()[2] == 0

    def slow(weight_version=None):
        raise Timeout("slow")

    phased.finish_weight_update = slow
    with pytest.raises(Timeout):
        sync.push(2)
    assert sync._trainer._signals.tolist()[2] == sync._trainer._ticket
    with pytest.raises(Aborted, match="given this attempt up"):  # and is on its way still
        phased.round.finish()


def test_each_attempt_has_a_number_of_its_own(connect, phased, loader, source):
    """The one before was given up, and that is no word on this one."""
    sync = connect(phased, source)
    for version in (1, 2):
        sealed(sync, phased, version)
        sync._trainer.withdraw()
        with pytest.raises(Aborted):
            phased.round.finish()
    sealed(sync, phased, 3)
    phased.round.finish()
    assert phased.round.version == 3
    assert_equal(loader.weights, source)


def test_digests_that_never_come_end_at_the_deadline(connect, phased, loader, source):
    sync = connect(phased, source)
    trainer = sync._trainer
    trainer.publish(1, Deadline(30))
    phased.round.start()
    wire = info(trainer, "all") | {"deadline_s": 0.05}
    with pytest.raises(Timeout, match=r"not made the weights readable|not complete"):
        phased.round.update(wire)
    assert loader.handed is None
    sync.push(2)
    assert_equal(loader.weights, source)


# -- memory that moves, trainers that go -----------------------------------------------------------


def test_memory_that_moved_is_mapped_anew(connect, engine, loader, mapping_fabric, source):
    sync = connect(engine, source)
    sync.push(1)
    trainer, first = mapping_fabric.endpoints
    handed = loader.handed
    source["a"] = torch.full((12,), 9.0)
    sync.push(2)
    assert_equal(loader.weights, source)
    assert places(loader.handed) == places(source.items())
    assert loader.handed is not handed
    _, _, second = mapping_fabric.endpoints
    assert (first.closed, second.closed) == (True, False)
    assert list(mapping_fabric.exposed) == [(trainer.name, 2)]
    sync.push(3)
    assert len(mapping_fabric.endpoints) == 3


@pytest.fixture
def vigilant(monkeypatch):
    monkeypatch.setattr("vllm_wt.pull.worker._DEATH_S", 0.005)


@pytest.mark.usefixtures("vigilant")
def test_the_memory_of_a_dead_trainer_is_given_back_soon(
    connect, phased, loader, mapping_fabric, source
):
    sync = connect(phased, source)
    sync.push(1)
    trainer, reader = mapping_fabric.endpoints
    sealed(sync, phased, 2)
    wire = info(sync._trainer, "open")
    trainer.close()
    eventually(lambda: reader.closed)
    before, loader.handed = dict(loader.weights), None
    with pytest.raises(Aborted, match="The trainer has ended") as error:
        phased.round.finish()
    assert "connect again" in error.value.cure
    phased.round.start()
    with pytest.raises(PeerDead):
        phased.round.update(wire | {"op": "all"})
    assert loader.handed is None
    assert_equal(loader.weights, before)
    assert not phased.round.torn
    eventually(lambda: not watchers())
    other = {"a": torch.full((12,), 4.0)}
    second = connect(phased, other)
    second.push(1)
    assert_equal(loader.weights, other)
    (watcher,) = watchers()
    phased.engine.shutdown()
    watcher.join(20)
    assert watchers() == []


class HoldingNothing(KeepingLoader):
    """Knows just whether the tensors that it was given still exist."""

    def apply(self, weights):
        DictLoader.apply(self, weights)
        self.refs = [weakref.ref(tensor) for _, tensor in weights]


@pytest.mark.usefixtures("vigilant")
def test_no_tensor_over_the_memory_of_a_dead_trainer_is_held(
    connect, request, mapping_cls, mapping_fabric, source, monkeypatch
):
    # What is logged is kept for the report of the test, with the error and its frames.
    monkeypatch.setattr("vllm_wt.pull.worker.logger.warning", lambda *words: None)
    loader = HoldingNothing()
    engine = _shut_down_later(request, InProcessEngine(mapping_cls, loader))
    connect(engine, source).push(1)
    trainer, reader = mapping_fabric.endpoints
    trainer.close()
    eventually(lambda: reader.closed and not watchers())
    gc.collect()
    assert [ref() for ref in loader.refs] == [None, None]


@pytest.mark.usefixtures("vigilant")
def test_a_living_trainer_is_left_alone(connect, phased, mapping_fabric, source, monkeypatch):
    sync = connect(phased, source)
    _, reader = mapping_fabric.endpoints
    looks, check = [], reader.check

    def counted(owner):
        looks.append(owner)
        check(owner)

    monkeypatch.setattr(reader, "check", counted)
    eventually(lambda: len(looks) > 3)
    assert not reader.closed
    assert len(watchers()) == 1
    sync.push(1)


def test_each_connection_has_one_watcher(connect, phased, source, monkeypatch):
    monkeypatch.setattr("vllm_wt.pull.worker._DEATH_S", 0.01)
    sync = connect(phased, source)
    for version in range(1, 6):
        source["a"] = source["a"].clone()
        sync.push(version)
    eventually(lambda: len(watchers()) == 1)
    phased.engine.shutdown()
    eventually(lambda: not watchers())


def test_a_trainer_that_dies_before_it_is_read(connect, engine, loader, mapping_fabric, source):
    sync = connect(engine, source)
    sync.push(1)
    before = dict(loader.weights)
    mapping_fabric.check_error = PeerDead("gone")
    with pytest.raises(PeerDead, match="gone"):
        sync.push(2)
    assert_equal(loader.weights, before)
    mapping_fabric.check_error = None
    write(source)
    sync.push(2)
    assert_equal(loader.weights, source)


def test_a_worker_that_connects_anew_is_let_in(
    connect, round_engine, loader, mapping_fabric, source
):
    mapping_fabric.must_poll = True
    sync = connect(round_engine, source)
    sync.push(1)
    mapping_fabric.check_error = TransportError("a moment's trouble")
    with pytest.raises(TransportError, match="trouble"):
        sync.push(2)
    mapping_fabric.check_error = None
    write(source)
    sync.push(2, deadline_s=1)
    assert_equal(loader.weights, source)


def test_a_worker_that_is_asked_in_phases_after_all_is_let_in(
    connect, round_engine, loader, mapping_fabric, source
):
    mapping_fabric.must_poll = True
    sync = connect(round_engine, source)
    sync.push(1)
    round_engine.engine._drop_connection()
    round_engine.run_round = lambda info, version: None
    write(source)
    sync.push(2, deadline_s=20)
    assert_equal(loader.weights, source)


def test_a_worker_that_maps_moved_memory_is_let_in(connect, engine, loader, mapping_fabric, source):
    mapping_fabric.must_poll = True
    sync = connect(engine, source)
    for version in (1, 2, 3):
        source["a"] = source["a"] + 1
        sync.push(version, deadline_s=20)
        assert_equal(loader.weights, source)


@pytest.mark.parametrize("staging", ["auto", "none"])
def test_a_round_of_one_call_needs_no_thread(connect, round_engine, loader, source, staging):
    sync = connect(round_engine, source, staging=staging)
    before = set(threading.enumerate())
    during = []
    loader.during = lambda: during.append(set(threading.enumerate()) - before)
    for version in (1, 2):
        sync.push(version)
    assert during == [set(), set()]


# -- other stagings --------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["device", "host"])
def test_staged_in_memory_of_its_own_it_is_received(
    connect, engine, loader, mapping_fabric, source, staging
):
    sync = connect(engine, source, staging=staging)
    for version in (1, 2):
        write(source)
        sync.push(version)
        assert_equal(loader.weights, source)
        arena = engine.engine._arena._buffer
        first, end = arena.data_ptr(), arena.data_ptr() + arena.numel()
        assert all(first <= place < end for place in places(loader.handed).values())
    facts = engine.engine.report()
    assert (facts["staging"], facts["why"]) == (staging, "asked for")
    assert facts["arena_nbytes"] >= facts["needed_nbytes"] > 0
    assert watchers() == []


@pytest.fixture
def pausing(request, mapping_cls, loader):
    return _shut_down_later(request, PausingEngine(mapping_cls, loader))


@pytest.mark.parametrize("how", ["round_engine", "pausing"])
def test_without_staging_all_of_it_is_one_batch(connect, request, loader, source, how):
    engine = request.getfixturevalue(how)
    sync = connect(engine, source, staging="none")
    assert loader.batches == (("a", "b"),)
    handed = None
    for version in (1, 2, 3):
        write(source)
        sync.push(version)
        assert_equal(loader.weights, source)
        assert places(loader.handed) == places(source.items())
        assert handed is None or handed is loader.handed
        handed = loader.handed
    assert loader.numbers == [0, 0, 0]
    facts = engine.engine.report()
    assert (facts["staging"], facts["arena_nbytes"]) == ("none", 0)
    if how == "pausing":
        assert not engine.paused
        assert engine.calls.count("pause") == 3


def test_without_staging_it_is_refused_unless_paused(connect, phased, loader, source):
    sync = connect(phased, source, staging="none")
    with pytest.raises(NotPaused, match="loads while it receives"):
        sync.push(1)
    assert (loader.handed, loader.numbers) == (None, [])
    assert not phased.round.torn


@pytest.mark.parametrize("how", ["round_engine", "pausing"])
def test_without_staging_a_load_that_fails_tears(connect, request, loader, source, how):
    engine = request.getfixturevalue(how)
    sync = connect(engine, source, staging="none")
    sync.push(1)
    loader.fail = ValueError("layer")
    with pytest.raises(TransportError, match="ValueError: layer"):
        sync.push(2)
    assert sync.status()[0].torn
    assert engine.paused == (how == "pausing")
    loader.fail = None
    write(source)
    sync.push(3)
    assert_equal(loader.weights, source)
    (status,) = sync.status()
    assert (status.version, status.torn, status.paused) == (3, False, False)


def test_without_staging_what_is_corrupt_is_not_loaded(
    connect, round_engine, loader, mapping_fabric, source
):
    mapping_fabric.mapped = tampering(0)
    sync = connect(round_engine, source, staging="none")
    with pytest.raises(CorruptTransfer, match="'a'"):
        sync.push(1)
    assert loader.numbers == []
    assert not sync.status()[0].torn
