"""Clients of engines in this process, over stand-ins for releases that are not installed."""

from __future__ import annotations

import asyncio
import itertools
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_wt import registry
from vllm_wt.clients import local
from vllm_wt.clients.local import AsyncLocalClient, LocalClient
from vllm_wt.errors import CorruptTransfer, EngineError, PeerDead, Timeout, UnsupportedVllm


class _Engine:
    """Of an AsyncLLM, what a pause takes."""

    class engine_core:
        class resources:
            engine_dead = False

    def __init__(self):
        self.calls = []

    async def finish_weight_update(self, weight_version=None): ...

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.calls.append((mode, clear_cache))

    async def resume_generation(self):
        self.calls.append("resume")

    async def is_paused(self):
        return self.calls[-1:] != ["resume"]


def _run(engine, *calls):
    async def session():
        client = AsyncLocalClient(engine, asyncio.get_running_loop())
        return [await asyncio.to_thread(getattr(client, call)) for call in calls]

    return asyncio.run(session())


def test_an_async_engine_keeps_its_requests_while_it_is_paused():
    engine = _Engine()
    answers = _run(engine, "pause", "is_paused", "resume", "is_paused")
    assert answers == [None, True, None, False]
    assert engine.calls == [("keep", True), "resume"]  # with vLLM's own default for its caches


def test_an_async_engine_is_paused_as_asked():
    engine = _Engine()

    async def session():
        client = AsyncLocalClient(engine, asyncio.get_running_loop())
        await asyncio.to_thread(client.pause, "wait", False)

    asyncio.run(session())
    assert engine.calls == [("wait", False)]


def test_an_async_engine_of_a_release_that_would_abort_them():
    class Older(_Engine):
        async def pause_generation(self, *, wait_for_inflight_requests=False):
            raise AssertionError("it would abort them")

    with pytest.raises(UnsupportedVllm, match="without losing requests") as error:
        _run(Older(), "pause")
    assert error.value.got == "pause_generation(*, wait_for_inflight_requests=False)"
    assert error.value.cure


def test_an_async_engine_of_a_release_without_pause():
    engine = types.SimpleNamespace(finish_weight_update=_Engine().finish_weight_update)
    with pytest.raises(UnsupportedVllm) as error:
        _run(engine, "pause")
    assert error.value.got == "none"
    assert _run(engine, "is_paused") == [None]


def test_a_pause_that_fails_is_typed():
    class Failing(_Engine):
        async def pause_generation(self, *, mode="abort", clear_cache=True):
            raise RuntimeError("boom")

    with pytest.raises(EngineError, match="boom") as error:
        _run(Failing(), "pause")
    assert error.value.where == "pause"


def test_an_llm_is_idle_between_calls():
    llm = types.SimpleNamespace(finish_weight_update=lambda: None)
    client = LocalClient(llm)
    assert client.idle_between_calls is True
    assert not hasattr(client, "pause")


REPORTS = [{"rank": 0}, {"rank": 1}]


@pytest.fixture
def _installed(monkeypatch):
    """One backend, whatever else this environment has."""
    monkeypatch.setattr(
        registry, "default", lambda: types.SimpleNamespace(backends={"memory": None})
    )


class _Asked:
    """Of either engine, what asking its workers takes; ``answer`` may be an error."""

    def __init__(self, backend="memory", answer=REPORTS):
        config = backend and types.SimpleNamespace(backend=backend)
        self.vllm_config = types.SimpleNamespace(weight_transfer_config=config)
        self.resources = types.SimpleNamespace(engine_dead=False)
        self.engine_core = types.SimpleNamespace(resources=self.resources)
        self.llm_engine = types.SimpleNamespace(
            vllm_config=self.vllm_config, engine_core=self.engine_core
        )
        self.answer = answer
        self.asked = []
        self.hold = None

    def finish_weight_update(self): ...

    def said(self, method):
        self.asked.append(method)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class _AskedLLM(_Asked):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if self.hold is not None:
            self.hold.wait()
        return self.said(method)


class _AskedAsync(_Asked):
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if self.hold is not None:
            await asyncio.Event().wait()
        return self.said(method)


def _reports(engine, **limits):
    if isinstance(engine, _AskedLLM):
        return LocalClient(engine, **limits).reports()

    async def session():
        client = AsyncLocalClient(engine, asyncio.get_running_loop(), **limits)
        return await asyncio.to_thread(client.reports)

    return asyncio.run(session())


_either = pytest.mark.parametrize("kind", [_AskedLLM, _AskedAsync])


@_either
@pytest.mark.parametrize("backend", ["memory", "wt_memory"])
@pytest.mark.usefixtures("_installed")
def test_workers_are_asked_what_they_say_of_themselves(kind, backend):
    engine = kind(backend)
    assert _reports(engine) == REPORTS
    assert engine.asked == ["vllm_wt_report"]
    engine.answer = [None]
    assert _reports(engine) is None


@_either
@pytest.mark.parametrize("backend", [None, "nccl", "wt_other"])
@pytest.mark.usefixtures("_installed")
def test_workers_of_another_engine_are_not_asked(kind, backend):
    """They lack the method, and every rank would raise at once."""
    engine = kind(backend)
    assert _reports(engine) is None
    assert engine.asked == []


@_either
@pytest.mark.usefixtures("_installed")
def test_a_failure_to_ask_the_workers_is_typed(kind):
    with pytest.raises(EngineError, match="boom") as error:
        _reports(kind(answer=RuntimeError("boom")))
    assert error.value.where == "reports"
    with pytest.raises(CorruptTransfer) as error:
        _reports(kind(answer="text"))
    assert (error.value.where, error.value.got) == ("reports", "str")
    dead = type("EngineDeadError", (Exception,), {})("gone")
    with pytest.raises(PeerDead) as error:
        _reports(kind(answer=dead))
    assert error.value.where == "reports"


@_either
@pytest.mark.usefixtures("_installed")
def test_workers_that_do_not_answer(kind):
    engine = kind()
    engine.hold = threading.Event()
    with pytest.raises(Timeout) as error:
        _reports(engine, call_s=0.01)
    assert error.value.where == "reports"
    engine.hold.set()


@pytest.fixture
def llm(_installed):
    """Whose workers take a round in one call, and answer when they are let."""
    llm = _Asked()
    llm.go = threading.Event()
    llm.versions = []
    llm.llm_engine.set_weight_version = llm.versions.append

    def rpc(method, kwargs=None):
        llm.asked.append(method)
        if kwargs:
            assert llm.go.wait(30)
        return REPORTS

    llm.collective_rpc = rpc
    llm.finish_weight_update = lambda version: llm.asked.append("finish")
    return llm


def test_a_call_waits_for_the_end_of_one_that_was_not_waited_for(llm):
    client = LocalClient(llm)
    answer = client.ask_round({"deadline_s": 30.0}, "7")
    assert not answer.has_come(0.0)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(client.reports)
        with pytest.raises(TimeoutError):
            asking.result(0.05)
        assert llm.asked == ["vllm_wt_round"]
        llm.go.set()
        assert asking.result(30) == REPORTS
    assert llm.asked == ["vllm_wt_round", "vllm_wt_report"]
    assert answer.result() == REPORTS
    assert llm.versions == ["7"]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_answer_is_left_where_no_call_comes_behind(llm, keeps):
    """Else the thread of that call would be in the LLM together with its owner."""
    if not keeps:
        del llm.llm_engine.set_weight_version
    assert LocalClient(llm).may_leave is not keeps


def test_an_engine_that_died_before_it_had_answered(llm):
    """vLLM will never do so."""
    client = LocalClient(llm)
    client.ask_round({"deadline_s": 30.0}, "7")
    llm.resources.engine_dead = True
    with pytest.raises(PeerDead):
        client.reports()
    llm.go.set()


def test_an_engine_that_does_not_answer_the_call_before(llm):
    client = LocalClient(llm, call_s=0.05)
    client.ask_round({"deadline_s": 30.0}, "7")
    with pytest.raises(Timeout, match=r"within 0\.05 s"):
        client.reports()
    llm.go.set()
    assert client.reports() == REPORTS


def test_a_call_that_was_interrupted_is_waited_for(llm, monkeypatch):
    client = LocalClient(llm)
    check = local._check_dead

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "_check_dead", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.run_round({"deadline_s": 30.0}, "7")
    monkeypatch.setattr(local, "_check_dead", check)
    threading.Timer(0.05, llm.go.set).start()
    assert client.reports() == REPORTS
    assert llm.asked == ["vllm_wt_round", "vllm_wt_report"]
    assert llm.versions == ["7"]


def test_an_answer_that_does_not_come(llm):
    client = LocalClient(llm, slack_s=0.0)
    answer = client.ask_round({"deadline_s": 0.05}, "7")
    with pytest.raises(Timeout, match=r"within 0\.05 s"):
        next(filter(None, (answer.has_come(0.001) for _ in itertools.count())))
    llm.go.set()


def _forgets(engine, calls, *, answer=True, connector=None, multimodal=False):
    """Gives an engine what resetting its caches takes."""
    engine.vllm_config.kv_transfer_config = connector
    engine.vllm_config.model_config = types.SimpleNamespace(is_multimodal_model=multimodal)

    def reset(*arguments):
        calls.append(arguments)
        return answer

    return reset


def test_an_llm_resets_its_caches(llm):
    llm.go.set()
    llm.llm_engine.reset_prefix_cache = _forgets(llm.llm_engine, llm.asked)
    client = LocalClient(llm)
    client.reset_caches(at_once=False)
    assert llm.asked == []
    client.reports()
    client.reports()
    assert llm.asked == [(True, False), "vllm_wt_report", "vllm_wt_report"], "once, and before"
    client.reset_caches()
    assert llm.asked[-1] == (True, False)


def test_an_llm_with_a_connector_and_an_encoder(llm):
    llm.llm_engine.reset_prefix_cache = _forgets(
        llm.llm_engine, llm.asked, connector=object(), multimodal=True
    )
    llm.llm_engine.engine_core.reset_encoder_cache = lambda: llm.asked.append("encoder")
    LocalClient(llm).reset_caches()
    assert llm.asked == [(True, True), "encoder"]


def test_an_llm_that_does_not_reset_its_caches(llm):
    llm.go.set()
    llm.llm_engine.reset_prefix_cache = _forgets(llm.llm_engine, llm.asked, answer=False)
    client = LocalClient(llm)
    client.reset_caches(at_once=False)
    with pytest.raises(EngineError) as error:
        client.reports()
    assert error.value.where == "reset_caches"
    assert llm.asked == [(True, False)]
    assert client.reports() == REPORTS


@pytest.mark.parametrize("multimodal", [False, True])
def test_an_async_engine_resets_its_caches(multimodal):
    engine = _Engine()
    engine.vllm_config = types.SimpleNamespace()
    reset = _forgets(engine, engine.calls, multimodal=multimodal)

    async def reset_prefix_cache(*arguments):
        return reset(*arguments)

    async def reset_encoder_cache():
        engine.calls.append("encoder")

    engine.reset_prefix_cache, engine.reset_encoder_cache = reset_prefix_cache, reset_encoder_cache
    _run(engine, "reset_caches")
    assert engine.calls == [(True, False)] + ["encoder"] * multimodal
    reset = _forgets(engine, engine.calls, answer=False)
    with pytest.raises(EngineError):
        _run(engine, "reset_caches")
