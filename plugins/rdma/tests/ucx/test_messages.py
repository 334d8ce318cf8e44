"""What readers ask of owners, as bytes."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from vllm_wt.transport import Copy
from vllm_wt_rdma.ucx import messages
from vllm_wt_rdma.ucx.batching import batch
from vllm_wt_rdma.ucx.memory import Region
from vllm_wt_rdma.ucx.messages import (
    Begin,
    Hello,
    Range,
    Read,
    Report,
    Stop,
    pack,
    pack_read,
    unpack,
)
from vllm_wt_rdma.ucx.reader import Plan

SESSION, NONCE = bytes(range(16)), bytes(range(16, 32))


@pytest.mark.parametrize(
    "message",
    [
        Begin(SESSION, 1 << 62, 17),
        Stop(SESSION, 1 << 62),
        Report(SESSION, 1 << 40),
    ],
)
def test_requests_arrive_as_they_were(message: Begin | Stop | Report) -> None:
    assert unpack(pack(message)) == message


def test_where_a_message_goes_is_one_place_where_its_copies_adjoin() -> None:
    copies = [
        Copy("owner", 0, 0, 0, 0, 4),
        Copy("owner", 1, 0, 0, 4, 4),  # adjoins
        Copy("owner", 2, 0, 0, 12, 4),  # a gap
        Copy("owner", 3, 0, 1, 16, 4),  # another buffer, at the next offset
        Copy("owner", 4, 0, 1, 8, 8),  # before it
    ]
    plan = Plan(Region(()))
    plan.add(cast(Any, "a connection"), batch(copies)["owner"])
    ((planned,),) = plan.messages.values()
    assert planned.places == (Range(0, 0, 8), Range(0, 12, 4), Range(1, 16, 4), Range(1, 8, 8))
    read = unpack(pack_read(SESSION, 1, 2, planned.packed))
    assert isinstance(read, Read)
    assert [each.buffer for each in read.ranges] == [0, 1, 2, 3, 4]


def hello(name: str = "reader:0") -> Hello:
    return Hello(SESSION, 3, 1 << 63, name, b"\1address")


def test_a_hello_arrives_as_it_was_with_its_proof() -> None:
    arrived = unpack(messages.pack_hello(hello(), NONCE))
    assert arrived == hello()
    assert isinstance(arrived, Hello)
    assert arrived.proof == hello().signed(NONCE)


def test_a_hello_that_was_changed_does_not_fit_its_proof() -> None:
    good = messages.pack_hello(hello(), NONCE)
    for index in range(1, len(good)):  # all but what kind of message it is
        changed = unpack(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
        assert not (isinstance(changed, Hello) and changed.proof == changed.signed(NONCE))
    assert hello().signed(SESSION) != hello().signed(NONCE)


@pytest.mark.parametrize("name", ["", "a b", "a|1", "n" * 129])
def test_a_name_that_no_endpoint_has_is_nothing(name: str) -> None:
    assert unpack(messages.pack_hello(hello(name), NONCE)) is None


def test_a_read_arrives_as_it_was() -> None:
    ranges = (Range(0, 1, 2), Range(3, 1 << 40, 1))
    packed = messages.pack_ranges(ranges)
    assert unpack(messages.pack_read(SESSION, 8, 9, packed)) == Read(SESSION, 8, 9, ranges)


def test_a_read_of_too_many_ranges_or_none_is_nothing() -> None:
    for count in (0, messages.MAX_RANGES + 1):
        packed = messages.pack_ranges((Range(0, 0, 1),) * count)
        assert unpack(messages.pack_read(SESSION, 8, 9, packed)) is None


def test_what_is_cut_is_nothing() -> None:
    for whole in (pack(Begin(SESSION, 1, 2)), pack(Stop(SESSION, 1)), pack(Report(SESSION, 1))):
        for length in range(len(whole)):
            assert unpack(whole[:length]) is None
        assert unpack(whole + b"\0") is None


def test_noise_is_no_request_that_cannot_be() -> None:
    source = random.Random(0)
    for _ in range(2000):
        unpack(bytes([source.randrange(8)]) + source.randbytes(source.randrange(200)))
