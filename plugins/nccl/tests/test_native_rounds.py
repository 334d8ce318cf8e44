"""Rounds of the native form: what comes is what was sent and announced, or all sides hear why not."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    InvalidInfo,
    ManifestMismatch,
    PeerDead,
    Timeout,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt_nccl import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine
from vllm_wt_nccl import native_sending as sending_module

from .support.native_sides import (
    TENSORS,
    Side,
    announced,
    free_port,
    in_background,
    joining,
    met,
    receiving,
    send,
    trainer_init,
    worker,
)

HOWS: list[dict[str, Any]] = [
    {"packed": True},
    {"packed": True, "packed_buffer_size_bytes": 4096},
    {"packed": True, "packed_buffer_size_bytes": 1, "packed_num_buffers": 1},
    {"packed": True, "packed_buffer_size_bytes": 1, "packed_num_buffers": 3},
    {"packed": False},
]


@pytest.fixture
def workers() -> Iterator[list[NCCLWeightTransferEngine]]:
    made = [worker(rank, 2) for rank in range(2)]
    yield made
    for each in made:
        each.shutdown()


@pytest.fixture
def group(workers: list[NCCLWeightTransferEngine]) -> Iterator[Any]:
    made = met(workers)
    yield made
    made.close()


def assert_same(came: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(came) == list(sent)
    for name, tensor in sent.items():
        assert came[name].dtype == tensor.dtype
        assert torch.equal(came[name], tensor)


def assert_moves(group: Any, workers: Any, **how: Any) -> None:
    futures = [receiving(each, announced(TENSORS, **how)) for each in workers]
    send(group, **how)
    for future in futures:
        assert_same(future.result(), TENSORS)


def assert_broken(group: Any, workers: Any) -> None:
    """No side takes it for a group that works; a new one does."""
    with pytest.raises(WrongOrder, match="This group is no more"):
        send(group)
    for each in workers:
        with pytest.raises((WrongOrder, WeightTransferError)):
            receiving(each, announced(TENSORS)).result()
    group.close()
    for each in workers:
        each.shutdown()
    new = met(workers)
    assert_moves(new, workers)
    new.close()


@pytest.mark.parametrize("how", HOWS)
def test_what_comes_is_what_was_sent(group: Any, workers: Any, how: dict[str, Any]) -> None:
    for _ in range(3):
        assert_moves(group, workers, **how)


def test_buffers_are_each_sides_own(group: Any, workers: Any) -> None:
    how = {"packed": True, "packed_buffer_size_bytes": 4096}
    futures = [
        receiving(each, announced(TENSORS, packed_num_buffers=count, **how))
        for each, count in zip(workers, (1, 4), strict=True)
    ]
    send(group, packed_num_buffers=3, **how)
    for future in futures:
        assert_same(future.result(), TENSORS)


def test_what_init_says_holds_for_updates_that_do_not() -> None:
    one, port = worker(), free_port()
    how = {"packed": True, "packed_buffer_size_bytes": 512}
    coming = joining(one, port, 2, **how)
    group = trainer_init(port, 2)
    coming.result()
    future = receiving(one, announced(TENSORS))
    send(group, **how)
    assert_same(future.result(), TENSORS)
    group.close()
    one.shutdown()


def test_the_dataclass_and_a_function_on_each(group: Any, workers: Any) -> None:
    halves = {name: tensor.to(torch.float16) for name, tensor in TENSORS.items()}
    futures = [receiving(each, announced(halves, packed=True)) for each in workers]
    args = NCCLTrainerSendWeightsArgs(
        group, post_iter_func=lambda item: item[1].to(torch.float16), packed=True
    )
    NCCLWeightTransferEngine.trainer_send_weights(iter(TENSORS.items()), trainer_args=args)
    for future in futures:
        assert_same(future.result(), halves)


def test_tensors_are_made_as_they_are_needed(group: Any, workers: Any) -> None:
    """Those of one parcel, and what is on its way."""
    shapes = {str(number): torch.empty(256) for number in range(50)}
    how = {"packed": True, "packed_buffer_size_bytes": 4 * 1024}
    futures = [receiving(each, announced(shapes, **how)) for each in workers]
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in shapes:
            tensor = torch.zeros(256)
            alive.add(tensor)
            most = max(most, len(alive))
            yield name, tensor

    send(group, gathered(), **how)
    for future in futures:
        future.result()
    assert most <= 12


def test_in_chunks(group: Any, workers: Any) -> None:
    names = list(TENSORS)
    for part in range(3):
        chunk = {name: TENSORS[name] for name in names[part::3]}
        futures = [receiving(each, announced(chunk, packed=True)) for each in workers]
        send(group, chunk.items(), packed=True)
        for future in futures:
            assert_same(future.result(), chunk)


# -- other than announced --------------------------------------------------------------------------


def _renamed() -> dict[str, torch.Tensor]:
    return {"other" if name == "ints" else name: tensor for name, tensor in TENSORS.items()}


MISTAKES: list[tuple[dict[str, torch.Tensor], str]] = [
    (_renamed(), "Expected: other int64.*Got: ints int64"),
    (TENSORS | {"a": TENSORS["a"].T}, r"Expected: a float32 \[50, 40\].*Got: a float32 \[40, 50\]"),
    (TENSORS | {"a": TENSORS["a"].int()}, "Expected: a int32.*Got: a float32"),
    (dict(list(TENSORS.items())[:-1]), "Got: .*from the trainer"),
    (TENSORS | {"more": torch.zeros(3)}, "Got: .*from the trainer"),
    (dict(reversed(TENSORS.items())), "Expected: last float16.*Got: a float32"),
]


@pytest.mark.parametrize("how", [{"packed": True}, {"packed": False}], ids=["packed", "single"])
@pytest.mark.parametrize(("mistaken", "match"), MISTAKES)
def test_other_tensors_than_announced(
    group: Any, workers: Any, mistaken: Any, match: str, how: Any
) -> None:
    futures = [receiving(each, announced(mistaken, **how)) for each in workers]
    with pytest.raises(ManifestMismatch, match=match):
        send(group, **how)
    for future in futures:
        with pytest.raises(ManifestMismatch, match=match):
            future.result()
    assert_broken(group, workers)


@pytest.mark.parametrize(
    "how",
    [{"packed": False}, {"packed": True, "packed_buffer_size_bytes": 8192}, {}],
)
def test_another_way_to_pack(group: Any, workers: Any, how: dict[str, Any]) -> None:
    futures = [receiving(each, announced(TENSORS, **how)) for each in workers]
    with pytest.raises(ManifestMismatch, match="pack in different ways"):
        send(group, packed=True, packed_buffer_size_bytes=4096)
    for future in futures:
        with pytest.raises(ManifestMismatch, match="Got: packed, 4096 bytes"):
            future.result()


def test_bytes_that_are_not_the_trainers(
    group: Any, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a broken fabric would bring: here the trainer's digest is of other bytes."""
    monkeypatch.setattr(sending_module, "content_digest", lambda payload: b"x" * 32)
    futures = [receiving(each, announced(TENSORS, packed=True)) for each in workers]
    with pytest.raises(CorruptTransfer, match="did not arrive as the trainer has them"):
        send(group, packed=True)
    for future in futures:
        with pytest.raises(CorruptTransfer, match="'a' to 'last'"):
            future.result()


# -- failures --------------------------------------------------------------------------------------


def test_a_worker_that_cannot_load(group: Any, workers: Any) -> None:
    def refuse(weights: Any) -> None:
        raise OSError("no room")

    info = announced(TENSORS, packed=True)
    failing = in_background(lambda: workers[0].receive_weights(info, refuse))
    other = receiving(workers[1], info)
    with pytest.raises(
        WeightTransferError, match="worker of rank 1 has given up: OSError: no room"
    ):
        send(group, packed=True)
    with pytest.raises(OSError, match="no room"):
        failing.result()
    said = other.exception()  # it may have had everything before
    assert said is None or "no room" in str(said)
    assert_broken(group, workers)


def test_the_trainer_returns_when_all_have_everything(group: Any, workers: Any) -> None:
    """A worker that fails with the last parcel, which is sent by then, is heard."""
    info = announced(TENSORS, packed=True)
    future = receiving(workers[1], info)
    sent: Any = None

    def refuse(weights: Any) -> None:
        with suppress(TimeoutError):
            sent.result(1.0)  # it has nothing left to do but wait for the workers
        raise OSError("no room")

    sent = in_background(lambda: send(group, packed=True))
    with pytest.raises(OSError, match="no room"):
        workers[0].receive_weights(info, refuse)
    with pytest.raises(WeightTransferError, match="no room"):
        sent.result()
    future.exception()


def test_a_buffer_is_filled_again_when_it_has_been_sent(group: Any, workers: Any) -> None:
    """Larger than what a socket takes in."""
    tensors = {str(number): torch.full((1 << 21,), float(number)) for number in range(12)}
    how = {"packed": True, "packed_buffer_size_bytes": 16 << 20, "packed_num_buffers": 1}
    futures = [receiving(each, announced(tensors, **how)) for each in workers]
    send(group, tensors.items(), **how)
    for future in futures:
        assert_same(future.result(), tensors)


def test_an_iterator_that_fails(group: Any, workers: Any) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", TENSORS["a"]
        raise LookupError("no such shard")

    futures = [receiving(each, announced(TENSORS)) for each in workers]
    with pytest.raises(LookupError, match="no such shard"):
        send(group, failing())
    for future in futures:
        with pytest.raises(Aborted, match="trainer has given up: LookupError: no such shard"):
            future.result()
    assert_broken(group, workers)


@pytest.mark.parametrize(
    "item",
    [("a", [1.0]), (1, torch.zeros(2)), ("a", torch.zeros(2, device="meta"))],
)
def test_what_is_no_tensor_of_this_process(group: Any, workers: Any, item: Any) -> None:
    futures = [receiving(each, announced(TENSORS)) for each in workers]
    with pytest.raises(InvalidInfo, match="trainer_send_weights"):
        send(group, [item])
    for future in futures:
        with pytest.raises(InvalidInfo, match="trainer_send_weights"):
            future.result()


def test_workers_that_take_no_part(group: Any, workers: Any) -> None:
    here = receiving(workers[0], announced(TENSORS))
    with pytest.raises(Timeout, match="1 of 2 workers"):
        send(group, deadline_s=1.0)
    with pytest.raises(Timeout, match="1 of 2 workers"):
        here.result()
    with pytest.raises(Timeout, match="1 of 2 workers"):  # of this round, which it comes late for
        receiving(workers[1], announced(TENSORS)).result()
    assert_moves(group, workers)  # nothing was on its way


def test_a_trainer_that_does_not_send(group: Any, workers: Any) -> None:
    futures = [receiving(each, announced(TENSORS, deadline_s=3)) for each in workers]
    for future in futures:
        with pytest.raises(Timeout, match="has not begun to send"):
            future.result()
    assert_moves(group, workers)


def test_an_update_that_is_refused_before_it_gets_here(group: Any, workers: Any) -> None:
    sent = in_background(lambda: send(group))
    while not group.last:
        pass
    for each in workers:
        each.abort_weight_update("its update_info is none")
    with pytest.raises(Aborted, match="its update_info is none"):
        sent.result()
    assert_moves(group, workers)


def test_an_update_info_that_cannot_be_is_told_to_the_trainer(group: Any, workers: Any) -> None:
    sent = in_background(lambda: send(group))
    while not group.last:
        pass
    info = announced({"a": torch.zeros(2)})
    info.dtype_names = ["float31"]
    for each in workers:
        with pytest.raises(ManifestMismatch, match="float31"):
            receiving(each, info).result()
    with pytest.raises(ManifestMismatch, match="float31"):
        sent.result()
    assert_moves(group, workers)


def test_an_abort_while_nobody_sends_changes_nothing(group: Any, workers: Any) -> None:
    assert_moves(group, workers)
    for each in workers:
        each.abort_weight_update("the model has refused to load it")
    assert_moves(group, workers)


def test_an_abort_ends_the_receiving(group: Any, workers: Any) -> None:
    futures = [receiving(each, announced(TENSORS)) for each in workers]
    while not all(each._receiving for each in workers):
        pass
    for each in workers:
        each.abort_weight_update("no longer wanted")
    for future in futures:
        with pytest.raises(WeightTransferError, match="no longer wanted"):
            future.result()


def test_a_worker_that_leaves_is_missed(group: Any, workers: Any) -> None:
    workers[1].shutdown()
    with pytest.raises(PeerDead, match="rank 2 has left"):
        send(group)
    with pytest.raises(PeerDead, match="rank 2 has left"):
        receiving(workers[0], announced(TENSORS)).result()


def test_a_trainer_that_leaves_is_missed(group: Any, workers: Any) -> None:
    group.close()
    for each in workers:
        with pytest.raises(PeerDead):
            receiving(each, announced(TENSORS)).result()


@pytest.fixture
def side() -> Iterator[Any]:
    made: list[Side] = []

    def make(role: str, port: int) -> Side:
        made.append(Side(role, port))
        return made[-1]

    yield make
    for each in made:
        each.close()


HELD = {name: torch.zeros(1000) for name in ("a", "b")}


@pytest.mark.parametrize(
    ("ending", "error"), [(signal.SIGKILL, PeerDead), (signal.SIGSTOP, Timeout)]
)
def test_a_trainer_that_ends_in_mid_round(side: Any, ending: int, error: Any) -> None:
    port, one = free_port(), worker()
    trainer = side("trainer", port)
    joining(one, port, 2).result()
    trainer.wait_until("met")
    coming = receiving(one, announced(HELD, deadline_s=5.0))
    trainer.wait_until("held")
    os.kill(trainer.pid, ending)
    with pytest.raises(error):
        coming.result()
    one.shutdown()
    new = met([one])
    assert_moves(new, [one])
    new.close()
    one.shutdown()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_in_mid_round(side: Any, ending: int) -> None:
    port = free_port()
    peer = side("worker", port)
    group = trainer_init(port, 2)
    peer.wait_until("met")
    sent = in_background(lambda: send(group, HELD.items(), deadline_s=5.0))
    peer.wait_until("held")
    os.kill(peer.pid, ending)
    with pytest.raises((PeerDead, Timeout, TransportError)):
        sent.result()
    with pytest.raises(WrongOrder, match="no more"):
        send(group)
    group.close()


def test_nothing_is_left_at_the_store(group: Any, workers: Any) -> None:
    """Beyond the last two rounds."""
    assert_moves(group, workers)
    before = group.rendezvous._store.num_keys()
    for _ in range(6):
        assert_moves(group, workers)
    assert group.rendezvous._store.num_keys() <= before + 8
