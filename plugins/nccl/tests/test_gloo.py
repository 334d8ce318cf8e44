"""Broadcasts between processes: exact, and what a dead or stopped peer does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead, Timeout, WeightTransferError

Make = Callable[[], Any]
LONG_S = 60.0
SIZES = (1, 4096, 30_000_001)


def _met(peer: Make, size: int) -> list[Any]:
    ranks = [peer() for _ in range(size)]
    port = ranks[0].call("host")
    for rank in ranks[1:]:
        rank.call("join", port)
    _meet(ranks)
    return ranks


def _meet(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        rank.begin("meet", number, len(ranks), LONG_S)
    for rank in ranks:
        rank.answer()


def test_bytes_come_in_order(peer: Make) -> None:
    ranks = _met(peer, 3)
    for value, nbytes in enumerate(SIZES, 1):
        for number, rank in enumerate(ranks):
            rank.call("start", nbytes, 0 if number else value, LONG_S)
        assert [rank.call("finish", LONG_S) for rank in ranks] == [[value, value]] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed(peer: Make, victim: int) -> None:
    ranks = _met(peer, 2)
    living = ranks[1 - victim]
    ranks[victim].stop()  # or it could take part before it dies
    living.call("start", SIZES[-1], 1, LONG_S)
    ranks[victim].kill()
    with pytest.raises(PeerDead):
        living.call("finish", LONG_S)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped(peer: Make, victim: int) -> None:
    ranks = _met(peer, 2)
    living = ranks[1 - victim]
    ranks[victim].stop()
    living.call("start", SIZES[-1], 1, 0.5)
    with pytest.raises(Timeout):
        living.call("finish", LONG_S)


def test_what_is_under_way_is_not_closed(peer: Make) -> None:
    """Its buffer may still be written to."""
    ranks = _met(peer, 2)
    ranks[1].call("start", SIZES[-1], 0, LONG_S)
    assert not ranks[1].call("close")
    ranks[0].call("start", SIZES[-1], 5, LONG_S)
    assert ranks[1].call("finish", LONG_S) == [5, 5]
    assert ranks[1].call("close")


def test_a_group_that_is_given_up_is_let_go_of_once_its_peer_has_ended(peer: Make) -> None:
    ranks = [peer(), peer()]
    ranks[1].call("join", ranks[0].call("host"))
    before = ranks[1].call("files")
    _meet(ranks)
    ranks[1].call("start", SIZES[-1], 0, LONG_S)
    assert not ranks[1].call("give_up")
    ranks[0].kill()
    deadline = Deadline(LONG_S)
    while ranks[1].call("files") > before:
        deadline.check("the group is still there")


def test_a_process_ends_whatever_is_under_way(peer: Make) -> None:
    ranks = _met(peer, 2)
    ranks[1].stop()
    ranks[0].call("start", SIZES[-1], 0, 4 * LONG_S)
    ranks[0].leave(LONG_S)


def test_a_rank_that_does_not_come(peer: Make) -> None:
    trainer = peer()
    trainer.call("host")
    with pytest.raises(WeightTransferError):
        trainer.call("meet", 0, 2, 0.5)
