"""Calls that may never return."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_wt.caller import Caller

LONG_S = 30


@pytest.fixture
def event():
    event = threading.Event()
    yield event
    event.set()


def test_one_thread_makes_all_calls():
    caller = Caller("a caller")
    threads = {caller(threading.current_thread).result(LONG_S) for _ in range(3)}
    assert [thread.name for thread in threads] == ["a caller"]


def test_an_error_is_the_callers():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        Caller("a caller")(fail).result(LONG_S)


def test_a_call_that_does_not_return_keeps_no_other_waiting(event):
    caller = Caller("a caller")
    stuck = caller(event.wait)
    assert caller.is_stuck
    assert caller(lambda: 7).result(LONG_S) == 7
    assert not stuck.done()
    event.set()
    assert stuck.result(LONG_S)


def test_a_call_that_was_given_up_before_it_began(event):
    caller = Caller("a caller")
    future = caller(event.wait)
    assert future.cancel()
    event.set()
    assert caller(lambda: 7).result(LONG_S) == 7


def test_calls_of_many_threads_are_all_made():
    caller = Caller("a caller")

    def ask(number):
        return [caller(lambda: number).result(LONG_S) for _ in range(200)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [[number] * 200 for number in range(8)]


def test_nothing_is_held_of_a_call_that_was_made():
    class Thing:
        def method(self):
            return 1

    caller, thing = Caller("a caller"), Thing()
    gone = weakref.ref(thing)
    assert caller(thing.method).result(LONG_S) == 1
    gc.disable()
    try:
        del thing
        assert gone() is None
    finally:
        gc.enable()


def test_its_thread_ends_with_it():
    caller = Caller("a caller")
    thread = caller(threading.current_thread).result(LONG_S)
    del caller
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()
