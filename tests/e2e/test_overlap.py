"""Requests that are in flight during a push are paused for the commit, and then go on to their end."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
import uuid
from contextlib import asynccontextmanager, closing, contextmanager

import pytest
from cutting import cutting_link
from trainers import in_background

from vllm_wt import WeightSync
from vllm_wt.clients.http import HttpClient
from vllm_wt.clients.local import AsyncLocalClient
from vllm_wt.errors import PeerDead, TornModel
from vllm_wt.testing.engines import start_async_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

NEW_TOKENS = 8
LONG = 48
STREAMS = 3
SHAPE = ModelShape(vocab=500)
PROMPTS = prompts(SHAPE, count=3)
PAUSE, FINISH = ("/pause", ""), ("/finish_weight_update", "")


class Requests:
    """Those of a test: how many tokens each that is in flight has had, and each that has ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._running: dict[str, int] = {}
        self._changed = threading.Condition()

    def has(self, name: str, tokens: int) -> None:
        with self._changed:
            self._running[name] = tokens
            self._changed.notify_all()

    def end(self, name: str) -> None:
        with self._changed:
            self.ended.append(self._running.pop(name, 0))
            self._changed.notify_all()

    @property
    def halfway(self) -> set[str]:
        """Those that have tokens, and not all of them."""
        with self._changed:
            return {name for name, tokens in self._running.items() if 0 < tokens < LONG}

    def wait_halfway(self) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(0 < tokens < LONG for tokens in self._running.values()), 60
            ), "nothing was generated during the push"


class Pausing:
    """Added to a client: a pause catches at least one request half-way, and what it catches is kept."""

    requests: Requests | None = None
    caught: frozenset[str] = frozenset()

    def pause(self):
        if self.requests is None:
            super().pause()
            return
        self.requests.wait_halfway()
        super().pause()
        while not self.requests.halfway:  # they were faster
            super().resume()
            self.requests.wait_halfway()
            super().pause()
        self.caught = frozenset(self.requests.halfway)


class AsyncClient(Pausing, AsyncLocalClient):
    pass


class ServerClient(Pausing, HttpClient):
    pass


# -- an AsyncLLM -----------------------------------------------------------------------------------


@pytest.mark.xdist_group("servers")
def test_pushes_into_an_async_engine(tmp_path):
    save_checkpoint(random_model(SHAPE, seed=0), tmp_path / "seed0")
    asyncio.run(_session(tmp_path))


async def _session(folder):
    engine = start_async_llm(
        folder / "seed0", SHAPE.dtype, "rdma", worker_extension_cls="wt_faults.FaultExtension"
    )
    try:
        client = AsyncClient(engine, asyncio.get_running_loop())
        model = random_model(SHAPE, seed=0)
        sync = await asyncio.to_thread(
            WeightSync.connect, client, backend="rdma", source=model, deadline_s=60
        )
        try:
            for version, overlap in ((1, True), (2, False), (3, True)):
                await _goes_on(engine, sync, client, model, folder, version, overlap)
            await _stays_paused_while_torn(engine, sync, client, model, folder)
            await _stays_paused_for_others(engine, sync, model, folder)
        finally:
            sync.close()
    finally:
        engine.shutdown()


async def _goes_on(engine, sync, client, model, folder, version, overlap):
    randomize(model, seed=version)
    async with _streaming(engine, client) as requests:
        result = await asyncio.to_thread(sync.push, version, overlap=overlap)
        assert client.caught
        assert not await engine.is_paused()
    assert set(requests.ended) == {LONG}
    assert len(requests.ended) >= STREAMS
    assert result.engines["engine0"].stop > 0
    assert result.engines["engine0"].resume > 0
    await _assert_generates(engine, model, folder / f"seed{version}")
    assert [status.paused for status in await asyncio.to_thread(sync.status)] == [False]


async def _stays_paused_while_torn(engine, sync, client, model, folder):
    """No token of a mix of two versions is made: what is in flight waits for a push that heals it."""
    await engine.collective_rpc("wt_fail_once", args=("apply", 0))
    randomize(model, seed=4)
    async with _streaming(engine, client) as requests:
        with pytest.raises(TornModel, match="injected into the commit") as error:
            await asyncio.to_thread(sync.push, 4)
        assert "still paused until a push succeeds: engine0" in error.value.cure
        assert await engine.is_paused()
        assert client.caught <= requests.halfway
        (status,) = await asyncio.to_thread(sync.status)
        assert (status.version, status.torn, status.paused) == (3, True, True)
        await asyncio.to_thread(sync.push, 5)
        assert not await engine.is_paused()
    assert set(requests.ended) == {LONG}
    await _assert_generates(engine, model, folder / "seed4")


async def _stays_paused_for_others(engine, sync, model, folder):
    await engine.pause_generation(mode="keep")
    randomize(model, seed=6)
    await asyncio.to_thread(sync.push, 6)
    assert await engine.is_paused()
    await engine.resume_generation()
    await _assert_generates(engine, model, folder / "seed6")


async def _assert_generates(engine, model, checkpoint):
    """What transformers does from the same weights."""
    save_checkpoint(model, checkpoint)
    tokens = []
    for ids in PROMPTS:
        async for output in _request(engine, ids, NEW_TOKENS):
            last = output
        tokens.append(list(last.outputs[0].token_ids))
    assert tokens == reference_tokens(checkpoint, PROMPTS, NEW_TOKENS)


@asynccontextmanager
async def _streaming(engine, client):
    """Requests one after another, some at a time, until the block ends; then until they end."""
    stop = asyncio.Event()
    requests = client.requests = Requests()
    client.caught = frozenset()

    async def stream(ids):
        while not stop.is_set():
            name = uuid.uuid4().hex
            async for output in _request(engine, ids, LONG):
                requests.has(name, len(output.outputs[0].token_ids))
            requests.end(name)

    streams = [asyncio.create_task(stream(ids)) for ids in PROMPTS[:STREAMS]]
    try:
        yield requests
    finally:
        client.requests = None
        stop.set()
        await asyncio.gather(*streams)


def _request(engine, ids, new_tokens):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    return engine.generate({"prompt_token_ids": ids}, params, request_id=uuid.uuid4().hex)


# -- a server --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "paused"])
def test_push_into_a_server(server, tmp_path, overlap):
    model = random_model(server.shape, seed=900)
    with (
        closing(ServerClient(server.url)) as client,
        WeightSync.connect(client, backend="rdma", source=model) as sync,
    ):
        with _streaming_http(server, client) as requests:
            sync.push(1, overlap=overlap)
            assert client.caught
            assert client.is_paused() is False
        assert set(requests.ended) == {LONG}
        assert len(requests.ended) >= STREAMS
        save_checkpoint(model, tmp_path / "pushed")
        assert server.tokens() == server.reference(tmp_path / "pushed")
    server.assert_in_step()


@contextmanager
def _streaming_http(server, client):
    stop = threading.Event()
    requests = client.requests = Requests()

    def stream(ids):
        while not stop.is_set():
            name, tokens = uuid.uuid4().hex, 0
            for new in _streamed(server.url, ids):
                tokens += new
                requests.has(name, tokens)
            requests.end(name)

    ids = prompts(server.shape, count=STREAMS)
    streams = [in_background(lambda ids=ids: stream(ids)) for ids in ids]
    try:
        yield requests
    finally:
        client.requests = None
        stop.set()
        for one in streams:
            one.result(60)


def _streamed(url, ids):
    """The number of tokens in each of the server's events."""
    body = {
        "prompt": ids,
        "max_tokens": LONG,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, timeout=120
    ) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[len(b"data: ") :])["choices"]
                yield len(choice["token_ids"] or ())


def test_trainer_killed_between_seal_and_finish(server):
    """Sealed everywhere, and not paused yet: the engine goes on with its old weights."""
    old, digests = server.tokens(), server.checksums()
    _killed_at(server, PAUSE)
    assert [state["state"] for state in server.state()] == ["sealed"] * server.tp
    with closing(HttpClient(server.url)) as client:
        assert client.is_paused() is False
    assert server.checksums() == digests
    assert server.tokens() == old
    _new_trainer_syncs(server, seed=911)


def test_trainer_killed_within_the_pause(server):
    """The workers say that a round is open: the next trainer knows whose pause it is, and ends it."""
    digests = server.checksums()
    _killed_at(server, FINISH)
    with closing(HttpClient(server.url)) as client:
        assert client.is_paused() is True
        assert server.checksums() == digests
        trainer = server.trainer()
        checkpoint = trainer.call("randomize", 912)
        trainer.call("connect", 60.0, server.url)
        assert client.is_paused() is False
        trainer.call("push", 1)
        assert client.is_paused() is False
    assert server.tokens() == server.reference(checkpoint)
    server.assert_in_step()


def _killed_at(server, call):
    trainer = server.trainer()
    with cutting_link(server.url) as link:
        trainer.call("connect", 60.0, link.url)
        trainer.call("randomize", 910)
        link.instead[call] = trainer.kill
        with pytest.raises(PeerDead):
            trainer.call("push", 1)


def _new_trainer_syncs(server, seed):
    trainer = server.trainer()
    checkpoint = trainer.call("randomize", seed)
    trainer.call("connect", 60.0, server.url)
    trainer.call("push", 1)
    assert server.tokens() == server.reference(checkpoint)
    with closing(HttpClient(server.url)) as client:
        assert client.is_paused() is False
    server.assert_in_step()
