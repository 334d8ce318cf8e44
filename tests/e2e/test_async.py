"""A push from a thread into a real AsyncLLM, whose event loop goes on serving meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch

from vllm_wt import WeightSync
from vllm_wt.clients.local import AsyncLocalClient, LocalClient
from vllm_wt.errors import EngineError, LoadError, PeerDead, Timeout, WrongOrder
from vllm_wt.testing.engines import start_async_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

NEW_TOKENS = 8
SHAPE = ModelShape(vocab=500)
PROMPTS = prompts(SHAPE, count=3)


@pytest.mark.engine
@pytest.mark.xdist_group("servers")
@pytest.mark.timeout(300)
def test_pushes_while_it_generates(tmp_path):
    save_checkpoint(random_model(SHAPE, seed=0), tmp_path / "seed0")
    asyncio.run(_session(tmp_path))


async def _session(folder):
    loop = asyncio.get_running_loop()
    engine = start_async_llm(folder / "seed0", SHAPE.dtype, "rdma")
    try:
        client = _Client(engine, loop)
        model = random_model(SHAPE, seed=0)
        sync = await asyncio.to_thread(
            WeightSync.connect, client, backend="rdma", source=model, deadline_s=60
        )
        try:
            await _rounds(engine, sync, client, model, folder)
            await _refused_on_the_loop(engine, sync, client, model, folder)
            await _dies_during_a_call(engine, client)
        finally:
            sync.close()
    finally:
        engine.shutdown()


async def _rounds(engine, sync, client, model, folder):
    seen = [await _tokens(engine)]
    for version in (1, 2, 3):
        randomize(model, seed=version)
        save_checkpoint(model, folder / f"seed{version}")
        client.streamed.clear()
        pushing = asyncio.create_task(asyncio.to_thread(sync.push, version))
        async with _streaming(engine, client):
            await pushing
        tokens = await _tokens(engine)
        assert tokens == reference_tokens(folder / f"seed{version}", PROMPTS, NEW_TOKENS)
        assert tokens not in seen
        seen.append(tokens)
        assert await engine.get_weight_version() == str(version)
        assert await asyncio.to_thread(client.weight_version) == str(version)
    assert await asyncio.to_thread(client.world_size) == 1


async def _refused_on_the_loop(engine, sync, client, model, folder):
    old = await _tokens(engine)
    with pytest.raises(WrongOrder, match="to_thread"):
        client.start_weight_update()
    with pytest.raises(WrongOrder, match="to_thread"):
        sync.push(4)
    assert await _tokens(engine) == old
    randomize(model, seed=5)
    save_checkpoint(model, folder / "seed5")
    client.streamed.set()
    with pytest.raises(LoadError, match="does not take these weights") as refused:
        await asyncio.to_thread(
            WeightSync.connect, client, backend="rdma", source={"no.such": torch.ones(2)}
        )
    assert refused.value.backend == "rdma"
    assert refused.value.cure
    await asyncio.to_thread(sync.push, 5)  # the first session is still there
    assert await _tokens(engine) == reference_tokens(folder / "seed5", PROMPTS, NEW_TOKENS)
    assert await engine.get_weight_version() == "5"


async def _dies_during_a_call(engine, client):
    """vLLM itself never answers the call in progress."""
    (core,) = engine.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGSTOP)  # or it might answer before it is killed
    calling = asyncio.create_task(asyncio.to_thread(client.start_weight_update))
    while not engine.engine_core.utility_results:  # it is on its way
        await asyncio.sleep(0.01)
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(PeerDead, match="EngineDeadError"):
        await calling
    with pytest.raises(PeerDead, match="EngineDeadError"):
        await asyncio.to_thread(client.start_weight_update)


class _Stopped:
    """Stands in for an engine that never answers."""

    class engine_core:
        class resources:
            engine_dead = False

    def __init__(self):
        self.cancelled = threading.Event()

    async def start_weight_update(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def finish_weight_update(self):
        raise RuntimeError("vLLM's own words")


def test_a_call_that_is_not_answered_times_out_and_is_cancelled():
    async def session():
        engine = _Stopped()
        client = AsyncLocalClient(engine, asyncio.get_running_loop(), call_s=0.01)
        with pytest.raises(Timeout, match="start_weight_update"):
            await asyncio.to_thread(client.start_weight_update)
        assert await asyncio.to_thread(engine.cancelled.wait, 10)
        client = AsyncLocalClient(engine, asyncio.get_running_loop())
        with pytest.raises(EngineError, match="vLLM's own words"):
            await asyncio.to_thread(
                client.finish_weight_update, "1"
            )  # vLLM before 0.27: no version

    asyncio.run(session())


def test_without_a_running_loop_it_is_refused():
    loop = asyncio.new_event_loop()
    client = AsyncLocalClient(_Stopped(), loop)
    with pytest.raises(WrongOrder, match="not running"):
        client.start_weight_update()
    loop.close()
    with pytest.raises(WrongOrder, match="a closed one"):
        client.start_weight_update()


def test_a_loop_that_ends_during_the_call_is_a_dead_peer():
    loop = asyncio.new_event_loop()
    client = AsyncLocalClient(_Stopped(), loop)
    waiting = threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with ThreadPoolExecutor(1) as executor:
        calling = executor.submit(client.start_weight_update)
        loop.call_soon_threadsafe(waiting.set)
        while not asyncio.all_tasks(loop):
            waiting.wait(0.01)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        with pytest.raises(PeerDead, match="loop ended"):
            calling.result(60)
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    loop.close()


def test_an_llm_that_dies_during_a_call_is_a_dead_peer():
    """A stand-in: the call of a vLLM whose engine died never returns."""
    never, resources = threading.Event(), types.SimpleNamespace(engine_dead=False)

    def start():
        resources.engine_dead = True
        never.wait()

    llm = types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(engine_core=types.SimpleNamespace(resources=resources)),
        start_weight_update=start,
        finish_weight_update=never.wait,
    )
    with pytest.raises(PeerDead, match="EngineDeadError"):
        LocalClient(llm).start_weight_update()
    resources.engine_dead = False
    with pytest.raises(Timeout, match="finish_weight_update"):
        LocalClient(llm, call_s=0.01).finish_weight_update()
    never.set()


class _Client(AsyncLocalClient):
    """Pauses for the commit only when requests have gone on during the transfer."""

    def __init__(self, engine, loop):
        super().__init__(engine, loop)
        self.streamed = threading.Event()

    def pause(self):
        assert self.streamed.wait(60), "nothing was generated during the push"
        super().pause()


@asynccontextmanager
async def _streaming(engine, client):
    """Requests one after another; ``client.streamed`` is set at the second token of one."""
    stop = asyncio.Event()

    async def stream():
        while not stop.is_set():
            async for output in _request(engine, PROMPTS[0], 48):
                if len(output.outputs[0].token_ids) > 1:
                    client.streamed.set()

    streaming = asyncio.create_task(stream())
    try:
        yield
    finally:
        stop.set()
        await streaming


async def _tokens(engine):
    tokens = []
    for ids in PROMPTS:
        async for output in _request(engine, ids, NEW_TOKENS):
            last = output
        tokens.append(list(last.outputs[0].token_ids))
    return tokens


def _request(engine, ids, new_tokens):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    return engine.generate({"prompt_token_ids": ids}, params, request_id=uuid.uuid4().hex)
