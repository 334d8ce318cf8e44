"""A trainer and its workers come together, or all of them hear why not."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch.distributed as dist

from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, WeightTransferError
from vllm_wt_nccl.native_info import NCCLWeightTransferInitInfo
from vllm_wt_nccl.native_meeting import TELL_S
from vllm_wt_nccl.native_members import Member, require_fitting

from .support.native_sides import (
    HOST,
    TENSORS,
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


def _assert_moves(group: Any, workers: list[Any]) -> None:
    futures = [receiving(each, announced(TENSORS)) for each in workers]
    send(group)
    for future in futures:
        assert list(future.result()) == list(TENSORS)


def _close(group: Any, workers: list[Any]) -> None:
    group.close()
    for each in workers:
        each.shutdown()


@pytest.mark.parametrize("address", [HOST, "localhost", "::1", "[::1]"])
def test_workers_may_come_first(address: str) -> None:
    port = free_port()
    workers = [worker(rank, 2) for rank in range(2)]
    futures = [joining(each, port, 3, address=address) for each in workers]
    group = trainer_init(port, 3, address)
    for future in futures:
        future.result()
    _assert_moves(group, workers)
    assert not dist.is_initialized()
    _close(group, workers)


def test_the_trainer_may_come_first() -> None:
    port = free_port()
    coming = in_background(lambda: trainer_init(port, 2))
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                break
    one = worker()
    joining(one, port, 2).result()
    _assert_moves(coming.result(), [one])
    _close(coming.result(), [one])


def test_several_engines_each_with_an_offset() -> None:
    port = free_port()
    first, second = [worker(rank, 2) for rank in range(2)], [worker()]
    futures = [joining(each, port, 4) for each in first]
    futures.append(joining(second[0], port, 4, rank_offset=3))
    group = trainer_init(port, 4)
    for future in futures:
        future.result()
    _assert_moves(group, first + second)
    _close(group, first + second)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("offset", [1, 3])
def test_B07_every_worker_has_a_rank_of_its_own(replicas: int, size: int, offset: int) -> None:
    """Tensor times pipeline parallel ranks, of each data-parallel replica of an engine."""
    world_size = offset + replicas * size
    info = NCCLWeightTransferInitInfo(HOST, 1, offset, world_size)
    workers = [worker(rank, size, replica) for replica in range(replicas) for rank in range(size)]
    assert [each._member(info).rank for each in workers] == list(range(offset, world_size))


def test_B07_replicas_of_an_engine_follow_each_other() -> None:
    port = free_port()
    workers = [worker(rank, 2, replica) for replica in range(2) for rank in range(2)]
    futures = [joining(each, port, 5) for each in workers]
    group = trainer_init(port, 5)
    for future in futures:
        future.result()
    assert [each._group.rank for each in workers] == [1, 2, 3, 4]  # type: ignore[union-attr]
    _close(group, workers)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"world_size": 4}, "Expected: 3, which the trainer has .* Got: 4, of rank"),
        ({"world_size": 2}, "Expected: 3, which the trainer has .* Got: 2, of rank"),
        ({"rank_offset": 0}, "cannot have rank 0: the trainer is rank 0"),
        ({"rank_offset": -3}, "cannot have rank -3"),
        ({"rank_offset": 2}, "Expected: ranks 1 to 2.* Got: ranks 2 to 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_on_all_sides(
    changes: dict[str, int], match: str
) -> None:
    port = free_port()
    workers = [worker(rank, 2) for rank in range(2)]
    futures = [joining(each, port, **({"world_size": 3} | changes)) for each in workers]
    with pytest.raises(InvalidInfo, match=match) as caught:
        trainer_init(port, 3)
    assert caught.value.cure
    for future in futures:
        with pytest.raises(InvalidInfo, match=match):
            future.result()
    # The port is free again, though the error is still held.
    futures = [joining(each, port, 3) for each in workers]
    group = trainer_init(port, 3)
    for future in futures:
        future.result()
    _close(group, workers)


def test_two_engines_with_one_offset() -> None:
    port = free_port()
    futures = [joining(worker(), port, 4) for _ in range(2)]
    with pytest.raises(InvalidInfo, match="Two workers have rank 1"):
        trainer_init(port, 4)
    for future in futures:
        with pytest.raises(InvalidInfo, match="Two workers have rank 1"):
            future.result()


def test_workers_on_several_kinds_of_device() -> None:
    trainer = Member(rank=0, world_size=3, first=0, workers=1, device="any")
    workers = [
        Member(rank=rank, world_size=3, first=1, workers=2, device=device)
        for rank, device in ((1, "cpu"), (2, "cuda"))
    ]
    with pytest.raises(InvalidInfo, match="different kinds of device"):
        require_fitting(trainer, workers)


def test_a_worker_that_does_not_come_is_missed_by_all() -> None:
    port = free_port()
    here = joining(worker(0, 2), port, 3)
    with pytest.raises(Timeout, match=r"1 of 2 workers; missing ranks \[2\]"):
        trainer_init(port, 3, deadline_s=2.0)
    with pytest.raises(Timeout, match=r"missing ranks \[2\]"):
        here.result()


def test_a_refusal_is_told_soon_where_little_time_is_left() -> None:
    """The other worker of the engine, which is on its way, need not come."""
    port = free_port()
    here = joining(worker(0, 2), port, 4)
    coming = in_background(lambda: trainer_init(port, 3, deadline_s=1.0))
    with pytest.raises(InvalidInfo, match="different world sizes"):
        coming.result(1.0 + TELL_S + 2.0)
    with pytest.raises(InvalidInfo, match="different world sizes"):
        here.result()


def test_a_worker_that_gives_up_ends_the_waiting_of_all() -> None:
    port = free_port()
    coming = in_background(lambda: trainer_init(port, 3))
    with pytest.raises(Timeout, match=r"within 0\.9 s"):
        joining(worker(0, 2), port, 3, deadline_s=1.0).result()
    with pytest.raises(Timeout, match=r"within 0\.9 s.* Got: 1 of 2 workers; missing ranks \[2\]"):
        coming.result()


def test_a_trainer_that_never_comes() -> None:
    with pytest.raises(Timeout, match="has not come to where this worker was told"):
        joining(worker(), free_port(), 2, deadline_s=0.5).result()


def test_an_init_that_is_given_up() -> None:
    engine = worker()
    coming = joining(engine, free_port(), 2)
    while engine._connecting is None:
        pass
    engine.abort_weight_update("no longer wanted")
    with pytest.raises(WeightTransferError, match="no longer wanted"):
        coming.result()


def test_something_else_that_listens_there() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises((Timeout, PeerDead)):
            joining(worker(), port, 2, deadline_s=0.5).result()
        with pytest.raises(InvalidInfo, match=f"port {port}"):
            trainer_init(port, 2)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_is_all_of_a_hosts(address: str) -> None:
    with pytest.raises(InvalidInfo, match="master_address"):
        trainer_init(free_port(), 2, address)
    with pytest.raises(InvalidInfo, match="master_address"):
        joining(worker(), free_port(), 2, address=address).result()


@pytest.mark.parametrize("address", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_that_is_not_the_trainers(address: str) -> None:
    with pytest.raises(InvalidInfo, match=address):
        trainer_init(free_port(), 2, address)


def test_nobody_gets_into_an_earlier_group() -> None:
    first = worker()
    old = met([first])
    port = old.rendezvous.port
    late = worker()
    with pytest.raises(Timeout, match="The group of an earlier trainer"):
        joining(late, port, 2, deadline_s=0.5).result()
    with pytest.raises(InvalidInfo, match=r"end or close\(\) that first"):
        trainer_init(port, 2)
    _assert_moves(old, [first])  # it has not been disturbed
    coming = joining(late, port, 2)
    old.close()
    new = trainer_init(port, 2)  # which the worker that waits is for
    coming.result()
    _assert_moves(new, [late])
    _close(new, [first, late])
