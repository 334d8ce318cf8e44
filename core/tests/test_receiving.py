"""What is left of a receive that has come to its end: nothing that it used."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest

from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead
from vllm_wt.receiving import Receive


class Memory:
    """Stands for a trainer's."""


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("here", [True, False], ids=["here", "on a thread"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
def test_nothing_that_it_used_is_held(here, fails):
    memory = Memory()
    seen = weakref.ref(memory)

    def run(used):
        if fails:
            try:
                raise ValueError("first")
            except ValueError as error:
                raise PeerDead("gone", cure="connect again") from error

    receive = Receive(lambda memory=memory: run(memory), nullcontext, Deadline(30), here=here)
    receive.join(30)
    assert not receive.running
    assert isinstance(receive.error, PeerDead) is fails
    del memory
    assert seen() is None
    if fails:
        assert str(receive.error.__cause__) == "first"
