"""What becomes of requests and caches of real engines, by the ways in which a push pauses them."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import closing

import pytest

from vllm_wt import WeightSync
from vllm_wt.clients.local import AsyncLocalClient, LocalClient
from vllm_wt.clients.relay import RelayClient, RelayServer, engine_methods
from vllm_wt.testing.engines import greedy_tokens, start_async_llm, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

SHAPE = ModelShape(vocab=500)
BLOCK = 32
"""Tokens: what a cache has is whole blocks."""
SETTINGS = {"max_model_len": 256, "block_size": BLOCK}
PROMPT = [7 * n % SHAPE.vocab for n in range(BLOCK + 8)]
FEW, MANY = 8, 80
"""New tokens: of a request, and of one that is still in flight when the engine is paused."""


@pytest.mark.engine
@pytest.mark.xdist_group("servers")
@pytest.mark.timeout(300)
def test_ways_to_pause(tmp_path):
    save_checkpoint(random_model(SHAPE, seed=0), tmp_path / "seed0")
    asyncio.run(_session(tmp_path))


@pytest.mark.engine
@pytest.mark.xdist_group("servers")
@pytest.mark.timeout(300)
def test_an_llm_forgets_what_the_old_weights_have_read(tmp_path):
    """It is not paused. Nor is one that is served to a trainer, which is idle between no calls."""
    model = random_model(SHAPE, seed=0)
    save_checkpoint(model, tmp_path / "seed0")
    llm = start_llm(tmp_path / "seed0", SHAPE.dtype, "rdma", **SETTINGS)
    path = tmp_path / "engine.sock"
    with (
        closing(RelayServer(path, engine_methods(LocalClient(llm)))),
        closing(RelayClient(path)) as served,
    ):
        for number, engine in enumerate((llm, served)):
            with WeightSync.connect(engine, backend="rdma", source=model) as sync:
                for version, kv in ((1, "recompute"), (2, "keep"), (3, "recompute")):
                    before = greedy_tokens(llm, [PROMPT], FEW)
                    seed = 10 * number + version
                    randomize(model, seed=seed)
                    save_checkpoint(model, tmp_path / f"seed{seed}")
                    sync.push(version, kv=kv)
                    tokens = greedy_tokens(llm, [PROMPT], FEW)
                    right = tokens == reference_tokens(tmp_path / f"seed{seed}", [PROMPT], FEW)
                    assert right == (kv == "recompute"), "it has no cache, or was to keep it"
                    assert tokens != before


async def _session(folder):
    engine = start_async_llm(folder / "seed0", SHAPE.dtype, "rdma", **SETTINGS)
    try:
        client = AsyncLocalClient(engine, asyncio.get_running_loop())
        model = random_model(SHAPE, seed=0)
        sync = await asyncio.to_thread(
            WeightSync.connect, client, backend="rdma", source=model, deadline_s=60
        )
        pushes = _Pushes(engine, sync, model, folder)
        try:
            await _caches(pushes)
            await _requests_in_flight(pushes)
        finally:
            sync.close()
    finally:
        engine.shutdown()


class _Pushes:
    """Versions, each of new random weights of that seed, and requests."""

    def __init__(self, engine, sync, model, folder):
        self._engine, self._sync, self._model, self._folder = engine, sync, model, folder
        self.version = 0

    async def push(self, **how):
        self.version += 1
        randomize(self._model, seed=self.version)
        save_checkpoint(self._model, self._folder / f"seed{self.version}")
        await asyncio.to_thread(self._sync.push, self.version, **how)

    def expected(self, version, count):
        """Tokens of an engine that has never had other weights."""
        (tokens,) = reference_tokens(self._folder / f"seed{version}", [PROMPT], count)
        return tokens

    async def ask(self, count, begun=None):
        """One request, to its end; ``begun`` is set at its second token."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": PROMPT}
        async for output in self._engine.generate(prompt, params, request_id=uuid.uuid4().hex):
            if begun is not None and len(output.outputs[0].token_ids) > 1:
                begun.set()
        return output

    async def push_within_a_request(self, **how):
        """What becomes of a request in flight: its last output."""
        begun = asyncio.Event()
        asking = asyncio.create_task(self.ask(MANY, begun))
        await begun.wait()
        await self.push(**how)
        return await asking


def _tokens(output):
    return list(output.outputs[0].token_ids)


async def _caches(pushes):
    """With ``recompute`` nothing of the old weights is left, with ``keep`` all of it is."""
    await pushes.ask(FEW)
    assert (await pushes.ask(FEW)).num_cached_tokens == BLOCK, "this engine has no cache to test"
    await pushes.push(kv="keep")
    stale = await pushes.ask(FEW)
    assert stale.num_cached_tokens == BLOCK
    assert _tokens(stale) != pushes.expected(pushes.version, FEW)
    for how in ({}, {"kv": "recompute"}, {"pause": None}):
        await pushes.push(**how)
        fresh = await pushes.ask(FEW)
        assert fresh.num_cached_tokens == 0
        assert _tokens(fresh) == pushes.expected(pushes.version, FEW)


async def _requests_in_flight(pushes):
    before = pushes.expected(pushes.version, MANY)
    waited_for = await pushes.push_within_a_request(pause="wait")
    assert _tokens(waited_for) == before, "it ended with the weights that it began with"
    for how in ({"pause": "keep"}, {"pause": None}, {"kv": "keep"}):
        before = pushes.expected(pushes.version, MANY)
        kept = await pushes.push_within_a_request(**how)
        assert kept.outputs[0].finish_reason == "length"
        assert len(_tokens(kept)) == MANY
        assert _tokens(kept)[:2] == before[:2], "it began with the old weights"
        assert _tokens(kept) != before, "and has gone on with the new ones"
    aborted = await pushes.push_within_a_request(pause="abort")
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(_tokens(aborted)) < MANY
    fresh = await pushes.ask(FEW)
    assert _tokens(fresh) == pushes.expected(pushes.version, FEW)
