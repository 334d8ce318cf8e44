"""Trainers whose memory the workers map: weights are loaded from where they are.

The oracles: transformers by greedy tokens; and bit by bit what vLLM itself has loaded from the same
checkpoint when the engine started, by vLLM's checksums and by digests of all parameters and buffers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from ipc_trainer import (
    OWN_MEMORY,
    SCALED,
    IpcTrainer,
    close_shared_engines,
    ipc_server,
    maps_of,
    places_of,
    shared_engine,
    wait_until,
)

from vllm_wt import WeightSync
from vllm_wt.clients.local import AsyncLocalClient, LocalClient
from vllm_wt.errors import CorruptTransfer, ManifestMismatch
from vllm_wt.testing.engines import start_async_llm
from vllm_wt.testing.models import ModelShape, random_model, randomize, save_checkpoint

from .test_overlap import (
    LONG,
    SHAPE,
    STREAMS,
    Pausing,
    ServerClient,
    _assert_generates,
    _streaming,
    _streaming_http,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("ipc")]

SEEDS = (11, 0, 12, 0)
"""Of the weights of each push; those of 0 are what the engine has started with."""


@pytest.fixture(scope="session")
def ipc_engines(tmp_path_factory):
    yield lambda tp: shared_engine(tmp_path_factory.mktemp, tp)
    close_shared_engines()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, ipc_engines):
    engine = ipc_engines(request.param)
    yield engine
    engine.close_trainers()


@pytest.fixture
def engine_of_one(ipc_engines):
    engine = ipc_engines(1)
    yield engine
    engine.close_trainers()


def assert_holds(engine, version, checkpoint):
    """The engine generates what transformers does, and every rank says that it has this version."""
    assert engine.tokens() == engine.reference(checkpoint)
    assert engine.llm.get_weight_version() == str(version)
    states = engine.state()
    assert [(s["state"], s["version"]) for s in states] == [("idle", version)] * engine.tp
    engine.assert_in_step()


# -- where the trainer's weights are -------------------------------------------------------------


@pytest.mark.parametrize("memory", ["private", "shared", "mixed"])
def test_four_pushes_from_each_kind_of_memory(engine, memory):
    trainer = engine.trainer()
    if memory != "private":
        trainer.call("share", 1 if memory == "shared" else 2)
    trainer.call("connect")
    arena = engine.facts("arena_nbytes")
    seen = []
    for version, seed in enumerate(SEEDS, 1):
        checkpoint = trainer.call("randomize", seed)
        result = trainer.call("push", version)
        assert result["version"] == version
        assert_holds(engine, version, checkpoint)
        seen.append(engine.digests())
        assert (seen[-1] == engine.fresh) == (seed == 0)
    assert seen[0] != seen[2]
    assert engine.facts("staging") == ["mapped"] * engine.tp
    assert engine.facts("needed_nbytes") == [0] * engine.tp
    assert engine.facts("arena_nbytes") == arena, "something was received"
    assert trainer.call("generation") == 1
    _assert_mapped_where_it_is(engine, trainer, memory)


def _assert_mapped_where_it_is(engine, trainer, memory):
    """By the kernel's word: which of the trainer's memory the workers have mapped."""
    weights = places_of(trainer.pid, trainer.call("addresses"))
    assert (None in weights) == (memory != "shared")
    assert (weights == {None}) == (memory == "private")
    shared = weights - {None}
    for pid in engine.pids():
        assert shared <= {place for _, _, place in maps_of(pid)}
    nbytes = trainer.call("nbytes")
    blocks = [last - first for first, last, _ in maps_of(trainer.pid, OWN_MEMORY)]
    copies = [size for size in blocks if size > nbytes // 4]
    least, most = {"private": (1, 2), "shared": (0, 0), "mixed": (0.25, 1)}[memory]
    assert len(copies) == (memory != "shared"), "as many blocks of copies as are needed"
    assert least * nbytes <= sum(copies) <= most * nbytes


@pytest.mark.parametrize("verify", ["digest", "bytes", "off"])
@pytest.mark.parametrize("staging", ["auto", "none", "device"])
def test_each_way_to_stage_and_to_verify_loads_the_same(engine, staging, verify):
    trainer = engine.trainer()
    trainer.call("share", 2)
    # What is loaded at once needs an engine that generates nothing meanwhile: this test sees to it.
    trainer.call("connect", 60.0, None, {"staging": staging, "verify": verify}, staging == "none")
    for version, seed in enumerate((21, 0), 1):
        checkpoint = trainer.call("randomize", seed)
        trainer.call("push", version)
        assert_holds(engine, version, checkpoint)
        assert (engine.digests() == engine.fresh) == (seed == 0)
    said = {"auto": "mapped", "none": "none", "device": "device"}[staging]
    assert engine.facts("staging") == [said] * engine.tp
    assert all((needed > 0) == (staging == "device") for needed in engine.facts("needed_nbytes"))


# -- between two pushes --------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("how", ["data", "replaced"])
def test_a_parameter_that_gets_other_memory_is_found_there(engine, how, memory):
    trainer = engine.trainer()
    if memory == "shared":
        trainer.call("share")
    trainer.call("connect")
    trainer.call("randomize", 31, False)
    trainer.call("push", 1)
    before, generation = engine.trainers_memory(), trainer.call("generation")
    for version in (2, 3):
        trainer.call("move", how)
        trainer.call("scale", -2.0)
        old = engine.tokens()
        trainer.call("push", version)
        assert_holds(engine, version, trainer.call("save"))
        assert engine.tokens() != old
    # Copies are where they were, so that nobody has to look for them anew.
    assert trainer.call("generation") - generation == (2 if memory == "shared" else 0)
    wait_until(lambda: engine.trainers_memory() == before)
    places = places_of(trainer.pid, trainer.call("addresses")) - {None}
    for pid in engine.pids():
        assert places <= {place for _, _, place in maps_of(pid)}


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_parameter_that_is_written_to_arrives_with_the_next_push(engine, memory):
    trainer = engine.trainer()
    if memory == "shared":
        trainer.call("share")
    trainer.call("connect")
    trainer.call("randomize", 41, False)
    trainer.call("push", 1)
    for version in (2, 3, 4):
        old, digests = engine.tokens(), engine.digests()
        trainer.call("scale", -1.5)
        assert engine.digests() == digests, "the engine has the trainer's memory for its own"
        assert engine.tokens() == old
        trainer.call("push", version)
        assert engine.tokens() != old
        assert_holds(engine, version, trainer.call("save"))
    assert trainer.call("generation") == 1


def test_memory_that_differs_from_its_digests_is_never_committed(engine):
    """A round in phases; for one in one call see what another process changes, below."""
    trainer = engine.trainer()
    trainer.call("share")
    trainer.call("connect")
    checkpoint = trainer.call("randomize", 51)
    trainer.call("push", 1)
    digests = engine.digests()
    trainer.call("randomize", 52, False)
    trainer.call("spoil_digests_once")
    with pytest.raises(CorruptTransfer, match="did not arrive as the trainer has it"):
        trainer.call("push", 2)
    assert engine.digests() == digests
    assert_holds(engine, 1, checkpoint)
    checkpoint = trainer.call("randomize", 53)
    trainer.call("push", 3)
    assert_holds(engine, 3, checkpoint)


# -- in the process of the LLM -------------------------------------------------------------------


@pytest.fixture
def calls(engine, monkeypatch):
    """Names of what the engine is asked, from the client down."""
    made = []

    def watched(name):
        original = getattr(engine.llm, name)

        def call(*args, **kwargs):
            made.append(args[0] if name == "collective_rpc" else name)
            return original(*args, **kwargs)

        monkeypatch.setattr(engine.llm, name, call)

    for name in ("collective_rpc", "start_weight_update", "update_weights", "finish_weight_update"):
        watched(name)
    return made


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_a_round_of_the_llms_own_process_is_one_call(engine, calls, tmp_path, shared):
    model = random_model(engine.shape, seed=0)
    if shared:
        model.share_memory()
    with WeightSync.connect(engine.llm, backend="ipc", source=model) as sync:
        for version, seed in enumerate((61, 0, 62), 1):
            randomize(model, seed)
            old = engine.tokens()
            calls.clear()
            sync.push(version)
            assert calls == ["vllm_wt_round"]
            assert engine.tokens() != old
            assert (engine.digests() == engine.fresh) == (seed == 0)
            save_checkpoint(model, tmp_path / str(version))
            assert_holds(engine, version, tmp_path / str(version))
        model.get_parameter(SCALED).data = model.get_parameter(SCALED).detach() * -2
        calls.clear()
        sync.push(4)
        # The first was asked for before the trainer had seen that memory has moved.
        assert calls == ["vllm_wt_round"] * 2
        save_checkpoint(model, tmp_path / "moved")
        assert_holds(engine, 4, tmp_path / "moved")
        assert engine.facts("staging") == ["mapped"] * engine.tp
        (status,) = sync.status()
        assert (status.version, status.torn) == (4, False)
    wait_until(lambda: engine.trainers_memory() == [0] * engine.tp)


class SpoilingClient(LocalClient):
    """Once all is published, another process writes to the trainer's memory."""

    spoil = False

    def run_round(self, update_info, weight_version):
        if self.spoil:
            self.spoil = False
            _write_from_another_process()
        return super().run_round(update_info, weight_version)


def _write_from_another_process():
    """One byte into the largest block that the backend has made here."""
    files = {}
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        try:
            if OWN_MEMORY in os.readlink(path):
                files[path] = os.stat(path).st_size
        except FileNotFoundError:  # of the listing itself
            continue
    path = max(files, key=files.__getitem__)
    code = "import os, sys; f = os.open(sys.argv[1], os.O_RDWR); b = os.pread(f, 1, 5000); "
    code += "os.pwrite(f, bytes([b[0] ^ 1]), 5000)"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)


@pytest.mark.parametrize("staging", ["auto", "none"])
def test_what_another_process_has_changed_is_never_loaded(engine, tmp_path, staging):
    """One bit, after the round was published. Ranks that have not mapped it may have loaded theirs,
    which is told, where an update is loaded at once."""
    model = random_model(engine.shape, seed=71)
    client = SpoilingClient(engine.llm)
    with WeightSync.connect(client, backend="ipc", source=model, staging=staging) as sync:
        sync.push(1)
        save_checkpoint(model, tmp_path / "whole")
        digests = engine.digests()
        _in_place(model.get_parameter(SCALED), -model.get_parameter(SCALED))
        client.spoil = True
        with pytest.raises(CorruptTransfer):
            sync.push(2)
        assert not client.spoil, "nothing was changed"
        torn = staging == "none" and engine.tp > 1
        assert sync.status()[0].torn == torn
        for rank, (before, now) in enumerate(zip(digests, engine.digests(), strict=True)):
            assert before == now or (torn and rank % engine.tp > 0)
        _in_place(model.get_parameter(SCALED), -model.get_parameter(SCALED))
        sync.push(3)
        assert engine.digests() == digests
        assert_holds(engine, 3, tmp_path / "whole")


class WritingClient(LocalClient):
    """The trainer goes on training before the round has ended."""

    write = staticmethod(lambda: None)

    def run_round(self, update_info, weight_version):
        self.write()
        return super().run_round(update_info, weight_version)


def test_a_trainer_that_trains_on_too_early_is_told_so(engine, tmp_path):
    """Whatever the workers did: they may have loaded some of both."""
    model = random_model(engine.shape, seed=72)
    client = WritingClient(engine.llm)
    with WeightSync.connect(client, backend="ipc", source=model.share_memory()) as sync:
        sync.push(1)
        save_checkpoint(model, tmp_path / "whole")
        kept = model.get_parameter(SCALED).detach().clone()
        client.write = lambda: _in_place(model.get_parameter(SCALED), kept)
        with pytest.raises(ManifestMismatch, match="written to while the workers were reading"):
            sync.push(2)
        del client.write
        sync.push(3)
        assert not sync.status()[0].torn
        assert_holds(engine, 3, tmp_path / "whole")


def _in_place(param, values):
    with torch.no_grad():
        param.copy_(values)


# -- servers, and engines that generate meanwhile ------------------------------------------------


class CountingClient(ServerClient):
    """What it is asked, in order."""

    def __init__(self, url):
        super().__init__(url)
        self.calls = []

    def pause(self):
        super().pause()
        self.calls.append("pause")

    def resume(self):
        super().resume()
        self.calls.append("resume")

    def update_weights(self, info):
        self.calls.append(info["op"])
        super().update_weights(info)

    def finish_weight_update(self, version=None):
        self.calls.append("finish")
        super().finish_weight_update(version)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    with ipc_server(tmp_path_factory.mktemp("ipc-http"), ModelShape(vocab=500)) as server:
        yield server


@pytest.mark.slow
def test_a_server_is_paused_for_the_commit_alone(shared_server, tmp_path):
    server = shared_server
    model = random_model(server.shape, seed=81)
    with (
        closing(CountingClient(server.url)) as client,
        WeightSync.connect(client, backend="ipc", source=model) as sync,
    ):
        for version in (1, 2):
            randomize(model, 80 + version)
            client.calls.clear()
            with _streaming_http(server, client) as requests:
                sync.push(version)
                assert client.caught, "no request was running at the commit"
            assert set(requests.ended) == {LONG}
            assert len(requests.ended) >= STREAMS
            first, *_, last = (n for n, c in enumerate(client.calls) if c in {"pause", "resume"})
            within = {c for c in client.calls[first + 1 : last] if c not in {"pause", "resume"}}
            assert within == {"finish", "confirm"}
            assert "open" in client.calls[:first]
            assert client.calls[first - 1] == "seal"
            save_checkpoint(model, tmp_path / str(version))
            assert server.tokens() == server.reference(tmp_path / str(version))
            assert server.version() == str(version)
        workers = sync.status()[0].workers
        assert [worker.facts["staging"] for worker in workers] == ["mapped"]
    server.assert_in_step()


@pytest.mark.slow
def test_a_server_takes_pushes_from_a_trainer_in_another_process(shared_server):
    server = shared_server
    trainer = IpcTrainer(server.folder, server.shape)
    try:
        trainer.wait_ready()
        trainer.call("share", 2)
        trainer.call("connect", 60.0, server.url)
        for version in (1, 2, 3):
            checkpoint = trainer.call("randomize", 83 + version)
            trainer.call("push", version)
            assert server.tokens() == server.reference(checkpoint)
    finally:
        trainer.close()
    server.assert_in_step()


class AsyncClient(Pausing, AsyncLocalClient):
    pass


@pytest.mark.slow
def test_an_async_engine_generates_while_weights_are_verified(tmp_path):
    save_checkpoint(random_model(SHAPE, seed=0), tmp_path / "seed0")
    asyncio.run(_async_session(tmp_path))


async def _async_session(folder):
    engine = start_async_llm(folder / "seed0", SHAPE.dtype, "ipc")
    try:
        client = AsyncClient(engine, asyncio.get_running_loop())
        model = random_model(SHAPE, seed=0)
        sync = await asyncio.to_thread(WeightSync.connect, client, backend="ipc", source=model)
        try:
            for version, overlap in ((1, True), (2, False), (3, True)):
                randomize(model, seed=90 + version)
                async with _streaming(engine, client) as requests:
                    await asyncio.to_thread(sync.push, version, overlap=overlap)
                    assert client.caught, "no request was running at the commit"
                    assert not await engine.is_paused()
                assert set(requests.ended) == {LONG}
                await _assert_generates(engine, model, folder / f"seed{90 + version}")
            (status,) = await asyncio.to_thread(sync.status)
            assert [worker.facts["staging"] for worker in status.workers] == ["mapped"]
        finally:
            sync.close()
    finally:
        engine.shutdown()


# -- two hundred rounds --------------------------------------------------------------------------

ROUNDS, MOVES, SETTLED = 200, 10, 40
SLACK = 16 << 20
"""Bytes that allocators and queues may keep; what leaks by a copy of the model a move is twice that."""


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_two_hundred_rounds_leave_nothing_behind(engine_of_one, memory):
    engine, trainer = engine_of_one, engine_of_one.trainer()
    if memory == "shared":
        trainer.call("share")
    trainer.call("connect")

    def held():
        sides = [*engine.resources(), trainer.call("resources")]
        return [side | {"maps": len(maps_of(side["pid"]))} for side in sides]

    for version in range(1, ROUNDS + 1):
        if version % MOVES == 0:
            trainer.call("move", "data" if version % (2 * MOVES) else "replaced")
        trainer.call("randomize", version, False)
        trainer.call("push", version)
        if version == SETTLED:
            before = held()
    wait_until(lambda: [s["maps"] for s in held()] == [s["maps"] for s in before])
    for earlier, now in zip(before, held(), strict=True):
        assert now["threads"] <= earlier["threads"]
        assert now["fds"] <= earlier["fds"]
        assert now["rss"] < earlier["rss"] + SLACK
    assert_holds(engine, ROUNDS, trainer.call("save"))
    moves = ROUNDS // MOVES
    assert trainer.call("generation") == 1 + (moves if memory == "shared" else 0)
