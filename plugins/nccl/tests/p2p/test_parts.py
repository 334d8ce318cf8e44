"""The parts that need no peer: messages, their channel, keys, turns, tickets."""

from __future__ import annotations

import socket
import threading

import pytest

from vllm_wt_nccl.p2p import messages
from vllm_wt_nccl.p2p.channel import Channel, Garbage
from vllm_wt_nccl.p2p.keys import ConnectionStore
from vllm_wt_nccl.p2p.messages import (
    Begin,
    Challenge,
    End,
    Failed,
    Forget,
    Go,
    Hello,
    Key,
    Message,
    Plan,
    Ready,
    Report,
    Sending,
    Stop,
    Welcome,
    unpack,
)
from vllm_wt_nccl.p2p.tickets import Tickets
from vllm_wt_nccl.p2p.turns import Turns

HELLO = Hello(b"n" * 16, 7, 1.5, 1, "a-reader", b"p" * 32)
PLAN = Plan(3, (((0, 5, 7), (1, 0, 1)), ((0, 2**40, 2**33),)))
ALL: list[Message] = [
    Challenge(b"c" * 16),
    HELLO,
    Welcome(1, b"p" * 32),
    Key("0/1", b"\0\1"),
    Ready(),
    Failed("words"),
    PLAN,
    Forget(3),
    Begin(2**40, 3, 4),
    Go(1, 5),
    Stop(1),
    Report(2**53),
    Sending(1, 2),
    End(1, 2),
]


@pytest.mark.parametrize("message", ALL, ids=lambda each: type(each).__name__)
def test_a_message_is_what_it_was(message: Message) -> None:
    assert unpack(message.kind, message.body()) == message


@pytest.mark.parametrize("message", ALL, ids=lambda each: type(each).__name__)
def test_a_message_that_is_cut_or_longer_is_none_or_another(message: Message) -> None:
    body = message.body()
    for other in [body[:end] for end in range(len(body))] + [body + b"\0"]:
        assert unpack(message.kind, other) != message


def test_kinds_are_told_apart() -> None:
    assert len({each.kind for each in ALL}) == len(ALL)
    assert unpack(0, b"") is None
    assert unpack(len(ALL) + 1, b"") is None


@pytest.mark.parametrize(
    "body",
    [
        Hello(b"n" * 16, 7, float("nan"), 1, "a").body(),
        Hello(b"n" * 16, 7, -1.0, 1, "a").body(),
        Hello(b"n" * 16, 7, 1.0, 9, "a").body(),
        Hello(b"n" * 16, 7, 1.0, 1, "a b").body(),
        Hello(b"n" * 16, 7, 1.0, 1, "").body(),
        Hello(b"n" * 16, 7, 1.0, 1, "a" * 129).body(),
        Hello(b"n" * 16, 7, 1.0, 1, "\N{LATIN SMALL LETTER E WITH ACUTE}").body(),
    ],
    ids=["not a number", "seconds", "fabric", "name", "no name", "long name", "letters"],
)
def test_a_hello_that_makes_no_sense_is_none(body: bytes) -> None:
    assert unpack(Hello.kind, body) is None


@pytest.mark.parametrize(
    "body",
    [
        Plan(1, ()).body(),
        Plan(1, ((),)).body(),
        Plan(1, (((0, 0, 1),), ())).body(),
        (1).to_bytes(4, "big") + b"\xff" * 4,
        PLAN.body()[:-1],
    ],
    ids=["no buckets", "no rows", "one without", "many", "cut"],
)
def test_a_plan_that_makes_no_sense_is_none(body: bytes) -> None:
    assert unpack(Plan.kind, body) is None


def test_a_plan_of_too_many_rows_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpack(Plan.kind, PLAN.body()) == PLAN
    monkeypatch.setattr(messages, "MAX_ROWS", 2)
    assert unpack(Plan.kind, PLAN.body()) is None


def test_a_proof_is_of_the_secret_the_challenge_and_all_that_is_said() -> None:
    proof = HELLO.proven(b"secret", b"challenge")
    assert proof == Hello(b"n" * 16, 7, 1.5, 1, "a-reader").proven(b"secret", b"challenge")
    others = [
        HELLO.proven(b"another", b"challenge"),
        HELLO.proven(b"secret", b"another"),
        Hello(b"n" * 16, 8, 1.5, 1, "a-reader").proven(b"secret", b"challenge"),
        Hello(b"n" * 16, 7, 1.5, 1, "b-reader").proven(b"secret", b"challenge"),
        Hello(b"m" * 16, 7, 1.5, 1, "a-reader").proven(b"secret", b"challenge"),
    ]
    assert proof not in others
    assert Welcome.proven(b"s", b"n", 1) != Welcome.proven(b"s", b"n", 2)


def _channels() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one, 1 << 20), Channel(other, 1 << 20)


def test_messages_come_whole_in_order_and_before_the_end() -> None:
    here, there = _channels()
    said = [*ALL, Failed("x" * 10_000)] * 50  # more than the kernel takes at a time
    for message in said:
        here.say(message)
    heard: list[Message] = []
    while len(heard) < len(said):
        here.flush()
        heard += there.heard()
    assert heard == said
    here.say(Report(1))
    here.flush()
    here.close()
    assert there.heard() == [Report(1)]
    assert there.is_gone
    there.flush()
    there.close()


@pytest.mark.parametrize("said", [b"\xff" * 5, b"\0\0\0\0\x63", b"\0\0\0\1\x0c\0"])
def test_what_is_no_message_is_garbage(said: bytes) -> None:
    one, other = socket.socketpair()
    with one:
        channel = Channel(other, 1 << 20)
        one.sendall(said)
        with pytest.raises(Garbage):
            channel.heard()
        channel.close()


def test_a_key_is_waited_for_and_told() -> None:
    told: list[Key] = []
    store = ConnectionStore(told.append, 30.0)
    store.set("mine", "value")
    assert told == [Key("mine", b"value")]
    assert not store.check(["mine", "yours"])
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("yours")))
    waiting.start()
    assert store.take_in(Key("yours", b"other"))
    waiting.join(30)
    assert found == [b"other"]


def test_a_key_that_does_not_come_is_an_error_in_time_or_at_the_end() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        ConnectionStore(print, 0.01).get("key")
    store = ConnectionStore(print, 30.0)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.wait(["key"])
    with pytest.raises(RuntimeError, match="closed"):
        store.check(["key"])


def test_a_peer_leaves_no_more_keys_than_make_sense() -> None:
    store = ConnectionStore(print, 1.0)
    assert not store.take_in(Key("k" * 1000, b""))
    assert not store.take_in(Key("k", bytes(1 << 20)))
    taken = [store.take_in(Key(str(number), b"")) for number in range(10_000)]
    assert taken[0]
    assert not taken[-1]


def test_turns_are_kept_and_given_back() -> None:
    turns = Turns(2)
    assert [turns.take(who) for who in "aab"] == [True] * 3
    assert not turns.take("c")
    turns.give_back("c")
    assert not turns.take("c")
    turns.give_back("a")
    assert turns.take("c")
    assert not turns.take("a")


def test_the_latest_tickets_are_remembered() -> None:
    tickets = Tickets()
    for ticket in range(1, 11):
        tickets.add("reader", ticket)
        tickets.add("reader", ticket)
    assert [len(tickets.readers(ticket)) for ticket in range(1, 11)] == [0, 0] + [1] * 8
