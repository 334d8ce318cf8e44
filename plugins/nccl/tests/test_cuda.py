"""NCCL between processes on one GPU, each as if on a host of its own; as in test_gloo.py, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_wt.errors import InvalidInfo, PeerDead, Timeout, WeightTransferError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Make = Callable[..., Any]
LONG_S = 60.0
SIZES = (1, 4096, 30_000_001)
LARGE = 1 << 30


def _ranks(peer: Make, size: int, **environment: str) -> list[Any]:
    found = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"} | environment
    return [peer("cuda", **{"NCCL_HOSTID": f"host{n}"} | found) for n in range(size)]


def _meet(ranks: list[Any], group: str = "group") -> None:
    port = ranks[0].call("host")
    for rank in ranks[1:]:
        rank.call("join", port)
    for number, rank in enumerate(ranks):
        rank.begin("meet", number, len(ranks), LONG_S, group)
    for rank in ranks:
        rank.answer()


def _send(ranks: list[Any], nbytes: int, root: int, value: int) -> None:
    for number, rank in enumerate(ranks):
        rank.begin("start", nbytes, value if number == root else 0, LONG_S, root)
    for rank in ranks:
        rank.answer()
    assert [rank.call("finish", LONG_S) for rank in ranks] == [[value, value]] * len(ranks)


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_come_in_order_from_each_root(peer: Make, size: int) -> None:
    ranks = _ranks(peer, size)
    _meet(ranks)
    for value, nbytes in enumerate(SIZES, 1):
        for root in range(size):
            _send(ranks, nbytes, root, 10 * value + root)
    assert [rank.call("close") for rank in ranks] == [True] * size


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_then_another_that_comes(peer: Make, victim: int) -> None:
    ranks = _ranks(peer, 2)
    _meet(ranks)
    _send(ranks, 1000, 0, 1)
    living = ranks[1 - victim]
    ranks[victim].stop()  # or it could take part before it dies
    living.call("start", LARGE, 1, LONG_S, 0)
    ranks[victim].kill()
    with pytest.raises(PeerDead):
        living.call("finish", LONG_S)
    assert living.call("close")
    ranks[victim] = _ranks(peer, 2)[victim]
    _meet(ranks, "second")
    _send(ranks, SIZES[-1], 0, 9)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_then_another_that_comes(peer: Make, victim: int) -> None:
    ranks = _ranks(peer, 2)
    _meet(ranks)
    _send(ranks, 1000, 0, 1)
    living = ranks[1 - victim]
    ranks[victim].stop()
    living.call("start", LARGE, 1, 0.5, 0)
    with pytest.raises(Timeout):
        living.call("finish", LONG_S)
    assert living.call("close")
    ranks[victim] = _ranks(peer, 2)[victim]
    _meet(ranks, "second")
    _send(ranks, SIZES[-1], 0, 9)


def test_what_is_under_way_is_ended_by_close(peer: Make) -> None:
    ranks = _ranks(peer, 2)
    _meet(ranks)
    _send(ranks, 1000, 0, 1)
    ranks[1].call("start", LARGE, 0, LONG_S, 0)
    assert ranks[1].call("close")
    with pytest.raises(WeightTransferError, match="closed"):
        ranks[1].call("finish", LONG_S)


def test_a_process_ends_whatever_is_under_way(peer: Make) -> None:
    ranks = _ranks(peer, 2)
    _meet(ranks)
    _send(ranks, 1000, 0, 1)
    ranks[1].stop()
    ranks[0].call("start", LARGE, 0, 4 * LONG_S, 0)
    ranks[0].leave(LONG_S)


def test_a_rank_that_does_not_come(peer: Make) -> None:
    (trainer,) = _ranks(peer, 1)
    trainer.call("host")
    with pytest.raises(Timeout):
        trainer.call("meet", 0, 2, 0.5, "group")


def test_B48_two_ranks_on_one_gpu_are_refused(peer: Make) -> None:
    ranks = _ranks(peer, 2, NCCL_HOSTID="one")
    port = ranks[0].call("host")
    ranks[1].call("join", port)
    for number, rank in enumerate(ranks):
        rank.begin("meet", number, 2, LONG_S, "group")
    for rank in ranks:
        with pytest.raises(InvalidInfo, match="on one GPU"):
            rank.answer()


def test_what_is_queued_on_the_callers_stream_is_sent(peer: Make) -> None:
    """And what is queued on the receiver's, before the buffer is its to use, is not overtaken."""
    ranks = _ranks(peer, 2)
    _meet(ranks)
    _send(ranks, 1000, 0, 1)
    for rank in ranks:
        rank.call("delay")
    _send(ranks, SIZES[-1], 0, 77)
