"""Trainers that die, stop or lie while workers have their memory mapped.

After each of them the engine is in step, generates with its old weights, and takes those of the next
trainer without having been started again.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import count

import pytest
from ipc_trainer import close_shared_engines, shared_engine, wait_until
from trainers import in_background

from vllm_wt import WeightSync
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    PeerDead,
    Superseded,
    Timeout,
    TransportError,
    WeightTransferError,
)
from vllm_wt.info import Handle
from vllm_wt.serving import serving
from vllm_wt.testing.models import random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("ipc")]

_seeds = count(500)


@pytest.fixture(scope="session")
def ipc_engines(tmp_path_factory):
    yield lambda tp: shared_engine(tmp_path_factory.mktemp, tp)
    close_shared_engines()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, ipc_engines):
    engine = ipc_engines(request.param)
    yield engine
    engine.close_trainers()


def connected(engine, memory="shared"):
    """A trainer that has pushed once."""
    trainer = engine.trainer()
    if memory == "shared":
        trainer.call("share")
    trainer.call("connect")
    trainer.call("randomize", next(_seeds), False)
    trainer.call("push", 1)
    return trainer


@contextmanager
def unharmed(engine, connect="connect"):
    """What happens within leaves the engine with its weights; then a new trainer syncs."""
    tokens, digests = engine.tokens(), engine.digests()
    yield
    engine.assert_in_step()
    assert engine.digests() == digests
    assert engine.tokens() == tokens
    trainer = engine.trainer()
    checkpoint = trainer.call("randomize", next(_seeds))
    trainer.call(connect)
    assert not trainer.call("torn")
    trainer.call("push", 1)
    assert engine.tokens() == engine.reference(checkpoint) != tokens
    assert engine.facts("staging") == ["mapped"] * engine.tp
    engine.assert_in_step()


def memory_comes_back(engine):
    """The workers have nothing of a trainer's mapped any more: the kernel says so."""
    wait_until(lambda: engine.trainers_memory() == [0] * engine.tp)


def receiving(engine):
    return all(state["state"] == "receiving" for state in engine.state())


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_the_memory_of_a_trainer_killed_while_idle_comes_back(engine, memory):
    trainer = connected(engine, memory)
    trainer.call("push", 2)  # what is prepared for a second push holds it, too
    assert all(engine.trainers_memory())
    with unharmed(engine):
        trainer.kill()
        memory_comes_back(engine)


def test_the_memory_of_a_trainer_that_has_closed_comes_back(engine):
    trainer = connected(engine)
    trainer.call("push", 2)
    assert all(engine.trainers_memory())
    with unharmed(engine):
        trainer.call("disconnect")
        memory_comes_back(engine)


def test_a_trainer_killed_before_its_first_push(engine):
    trainer = engine.trainer()
    trainer.call("connect")
    with unharmed(engine):
        trainer.kill()
        memory_comes_back(engine)


def test_a_trainer_killed_after_start(engine):
    trainer = connected(engine)
    with unharmed(engine):
        engine.call("start_weight_update")  # the last thing that it has asked for
        trainer.kill()
        memory_comes_back(engine)


def test_a_trainer_killed_while_its_weights_are_waited_for(engine):
    trainer = connected(engine)
    trainer.call("randomize", next(_seeds), False)
    with unharmed(engine):
        engine.before["update_weights"] = trainer.stop  # before it has made the digests
        pushing = in_background(lambda: trainer.call("push", 2))
        wait_until(lambda: receiving(engine))
        trainer.kill()
        with pytest.raises(PeerDead):
            pushing.result(60)
        memory_comes_back(engine)


def test_a_trainer_killed_between_seal_and_finish(engine):
    trainer = connected(engine)
    trainer.call("randomize", next(_seeds), False)

    def die():
        trainer.kill()
        raise ConnectionError("this call never reached the engine")

    with unharmed(engine):
        engine.before["finish_weight_update"] = die
        with pytest.raises(PeerDead):
            trainer.call("push", 2)
        assert [state["state"] for state in engine.state()] == ["sealed"] * engine.tp
        memory_comes_back(engine)
        # Whoever finishes now: what was sealed is not there any more.
        with pytest.raises(Aborted, match="its memory was given back"):
            engine.call("finish_weight_update")


def test_trainers_killed_one_after_another_leave_nothing_behind(engine):
    def one_more():
        trainer = connected(engine)
        trainer.kill()
        memory_comes_back(engine)
        return engine.resources()

    one_more()
    before = one_more()
    for _ in range(4):
        one_more()
    wait_until(lambda: _no_more_than(engine.resources(), before))
    with unharmed(engine):
        pass


def _no_more_than(now, before):
    return all(
        each[kind] <= former[kind]
        for each, former in zip(now, before, strict=True)
        for kind in ("threads", "fds")
    )


# -- stopped -------------------------------------------------------------------------------------


def test_a_trainer_stopped_while_a_worker_connects(engine):
    """The deadline is the worker's own: the trainer has none while it is stopped."""
    trainer = connected(engine)
    info = trainer.call("describe", 2.0)
    with unharmed(engine):
        trainer.stop()
        with pytest.raises(Timeout, match="has not answered"):
            engine.call("init_weight_transfer_engine", info)
        engine.assert_in_step()
        trainer.kill()


def test_a_trainer_stopped_while_it_pushes(engine):
    trainer = connected(engine)
    trainer.call("randomize", next(_seeds), False)
    tokens = engine.tokens()
    with unharmed(engine, "reconnect"):  # it lives
        engine.before["update_weights"] = trainer.stop
        pushing = in_background(lambda: trainer.call("push", 2, 5.0))
        wait_until(lambda: receiving(engine))
        assert engine.tokens() == tokens  # it generates meanwhile
        memory_comes_back(engine)  # by the worker's own deadline
        trainer.go_on()
        with pytest.raises(WeightTransferError) as error:
            pushing.result(60)
        assert type(error.value) in {Timeout, Aborted}
        assert not trainer.call("torn")
    with pytest.raises(Superseded):
        trainer.call("push", 3)
    engine.assert_in_step()


def test_a_stopped_trainer_that_goes_on_after_it_was_replaced(engine):
    first, second = connected(engine), engine.trainer()
    first.call("randomize", next(_seeds), False)
    with unharmed(engine, "reconnect"):  # it lives
        engine.before["update_weights"] = first.stop
        pushing = in_background(lambda: first.call("push", 2))
        wait_until(lambda: receiving(engine))
        second.call("connect")
        first.go_on()
        with pytest.raises(Superseded, match="Another trainer has connected"):
            pushing.result(60)
        engine.assert_in_step()
        with pytest.raises(Superseded):
            first.call("push", 3)


# -- lies ----------------------------------------------------------------------------------------


def spoilt(info, change):
    """An init info with a handle that is as it should be but for one thing, with a right checksum."""
    handle = Handle.from_wire(info["handle"], backend="ipc")
    body = handle.unwrap(backend="ipc")
    fields = json.loads(body)
    new = change(fields)
    body = new if isinstance(new, bytes) else json.dumps(fields).encode()
    return info | {"handle": Handle.wrap(handle.owner, handle.generation, body).to_wire()}


def another_boot(fields):
    fields["boot"] = "0" * 8 + fields["boot"][8:]


def another_network(fields):
    fields["network"] += 1


def a_longer_segment(fields):
    fields["segments"][0] += 1 << 20


def a_shorter_buffer(fields):
    fields["buffers"][0]["nbytes"] -= 4


def an_offset_past_the_end(fields):
    fields["buffers"][0]["offset"] = fields["segments"][fields["buffers"][0]["memory"]]


def an_offset_beyond_64_bits(fields):
    fields["buffers"][0]["offset"] = 2**63


def a_segment_that_is_not_there(fields):
    fields["buffers"][0]["memory"] = len(fields["segments"])


def a_buffer_too_few(fields):
    fields["buffers"].pop()


def another_nonce(fields):
    fields["nonce"] = "0" * 32


def another_word(fields):
    fields["word"] = 1


def another_socket(fields):
    fields["address"] = "vllm-wt-ipc-" + "0" * 32


def another_generation(fields):
    fields["generation"] += 1


def memory_of_a_gpu(fields):
    fields["gpu"] = "0" * 32
    fields["allocations"] = [{"handle": "A" * 86 + "==", "nbytes": 1 << 20}]


def an_unknown_field(fields):
    fields["pickled"] = "gASVAAAA"


def half_of_it(fields):
    return json.dumps(fields).encode()[:-20]


def garbage(fields):
    return bytes(range(256))


LIES = {
    another_boot: TransportError,
    another_network: TransportError,
    a_longer_segment: CorruptTransfer,
    a_shorter_buffer: CorruptTransfer,
    an_offset_past_the_end: InvalidInfo,
    an_offset_beyond_64_bits: InvalidInfo,
    a_segment_that_is_not_there: InvalidInfo,
    a_buffer_too_few: CorruptTransfer,
    another_nonce: PeerDead,
    another_word: WeightTransferError,
    another_socket: PeerDead,
    another_generation: InvalidInfo,
    memory_of_a_gpu: TransportError,
    an_unknown_field: InvalidInfo,
    half_of_it: CorruptTransfer,
    garbage: CorruptTransfer,
}


def test_handles_that_lie_are_refused_and_harm_nothing(engine):
    """All of them with a checksum that holds, and from an owner that answers."""
    model = random_model(engine.shape, seed=next(_seeds)).share_memory()
    with (
        WeightSync.connect(engine.llm, backend="ipc", source=model) as sync,
        unharmed(engine),
    ):
        trainer = sync._trainer
        info = trainer.describe(Deadline(20)).to_wire()
        for lie, error_cls in LIES.items():
            with serving(trainer), pytest.raises(error_cls) as error:
                engine.call("init_weight_transfer_engine", spoilt(info, lie))
            assert type(error.value) is not Timeout, lie.__name__
            assert error.value.backend == "ipc", lie.__name__
            engine.assert_in_step()
        with serving(trainer):
            engine.call("init_weight_transfer_engine", info)  # it was right but for that


def test_a_handle_of_memory_that_was_given_up_is_refused(engine):
    model = random_model(engine.shape, seed=next(_seeds)).share_memory()
    with WeightSync.connect(engine.llm, backend="ipc", source=model) as sync:
        closed = sync._trainer.describe(Deadline(20)).to_wire()
    with unharmed(engine):
        with pytest.raises(PeerDead):
            engine.call("init_weight_transfer_engine", closed)
        engine.assert_in_step()
