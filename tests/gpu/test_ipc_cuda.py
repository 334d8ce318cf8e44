"""Trainers on the GPU of a real engine, whose memory the worker opens by CUDA IPC.

The oracles: transformers in float32; in any dtype a fresh engine of the same setting that loads the
same checkpoint, by its tokens and by digests of all its tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ipc_trainer import LONG_CYCLES, SCALED, IpcTrainer, wait_until

from vllm_wt import WeightSync
from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.errors import PeerDead, TransportError, WeightTransferError, WrongOrder
from vllm_wt.testing.engines import greedy_tokens, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW_TOKENS = 16
MIB = 1 << 20
SLACK = 64 * MIB
"""Bytes of the device that allocators and the driver may keep, in all of a test."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class Engine:
    """A vLLM engine that IPC trainers on its GPU reach, and what a test asks of it.

    Args:
        folder: For the socket and for checkpoints.
        shape: Of its model, whose weights are those of seed 0 unless a checkpoint is given.
        graphs: Whether it captures CUDA graphs.
        checkpoint: What it loads.
        overrides: Further arguments of ``LLM``.
    """

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        *,
        graphs: bool,
        checkpoint: Path | None = None,
        **overrides: Any,
    ) -> None:
        self.folder = folder
        self.shape = shape
        self.graphs = graphs
        self.prompts = prompts(shape, count=3)
        if checkpoint is None:
            checkpoint = folder / "seed0"
            save_checkpoint(random_model(shape, seed=0), checkpoint)
        self.llm = start_llm(
            checkpoint,
            shape.dtype,
            "ipc",
            enforce_eager=not graphs,
            max_num_seqs=8,
            worker_extension_cls="wt_ipc.IpcExtension",
            **overrides,
        )
        config = self.llm.llm_engine.vllm_config.compilation_config
        captured = config.cudagraph_mode is not None and config.cudagraph_mode.name != "NONE"
        assert captured == graphs
        self.before: dict[str, Callable[[], None]] = {}
        """What comes before the next call of a name."""
        self._lock = threading.RLock()  # an LLM takes one call at a time
        methods = engine_methods(LocalClient(self.llm))
        guarded = {name: self._guarded(name, method) for name, method in methods.items()}
        self._server = RelayServer(folder / "engine.sock", guarded)
        self._trainers: list[IpcTrainer] = []

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                if name in self.before:
                    self.before.pop(name)()
                return method(*args)

        return call

    def trainer(self, **environment: str) -> IpcTrainer:
        """A process of its own, whose model is on the GPU."""
        trainer = IpcTrainer(self.folder, self.shape, "cuda", **environment)
        self._trainers.append(trainer)
        trainer.wait_ready()
        return trainer

    def rpc(self, method: str, *args: Any) -> Any:
        """Call a method of the one worker."""
        with self._lock:
            (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def tokens(self) -> list[list[int]]:
        with self._lock:
            return greedy_tokens(self.llm, self.prompts, NEW_TOKENS)

    def digests(self) -> dict[str, str]:
        return self.rpc("wt_digests")

    def staging(self) -> str:
        return self.rpc("vllm_wt_report")["staging"]

    def assert_generates(self, checkpoint: str | Path) -> None:
        """What transformers does, where the dtype lets them agree."""
        if self.shape.dtype == "float32":
            want = reference_tokens(Path(checkpoint), self.prompts, NEW_TOKENS)
            assert self.tokens() == want

    def assert_whole(self, version: int) -> None:
        state = self.rpc("wt_state")
        assert (state["state"], state["version"], state["torn"]) == ("idle", version, False)
        assert state["meta"] == []

    def close_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def close(self) -> None:
        self.close_trainers()
        self._server.close()
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def running(folder: Path, shape: ModelShape, **arguments: Any) -> Iterator[Engine]:
    engine = Engine(folder, shape, **arguments)
    try:
        yield engine
    finally:
        engine.close()


def shape_of(dtype: str) -> ModelShape:
    """The vocabulary is padded; bfloat16 has a tied head too."""
    return ModelShape(hidden=256, layers=4, vocab=2000, tied=dtype == "bfloat16", dtype=dtype)


SETTINGS = [("float32", False), ("float32", True), ("bfloat16", True)]
NAMES = ["float32-eager", "float32-graphs", "bfloat16-graphs"]


@pytest.fixture(scope="module", params=SETTINGS, ids=NAMES)
def shared_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    dtype, graphs = request.param
    with running(tmp_path_factory.mktemp("ipc"), shape_of(dtype), graphs=graphs) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.close_trainers()


@pytest.fixture
def one_engine(engine: Engine) -> Engine:
    """For what the dtype and the graphs have no part in."""
    if engine.shape.dtype != "float32" or engine.graphs:
        pytest.skip("once is enough")
    return engine


@pytest.fixture
def fresh(engine: Engine, tmp_path: Path) -> Iterator[Callable[[str | Path], Engine]]:
    """Starts another engine of the same setting, which loads a checkpoint as any engine does."""
    started: list[Engine] = []

    def start(checkpoint: str | Path) -> Engine:
        arguments = {"graphs": engine.graphs, "checkpoint": Path(checkpoint)}
        started.append(Engine(tmp_path, engine.shape, **arguments))
        return started[-1]

    yield start
    for other in started:
        other.close()


# -- pushes --------------------------------------------------------------------------------------


def test_pushes_from_another_process_then_the_same_as_a_fresh_engine(
    engine: Engine, fresh: Callable[[str], Engine]
) -> None:
    addresses = engine.rpc("wt_addresses")
    trainer = engine.trainer()
    trainer.call("connect")
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", version)
        print(trainer.call("push", version))
        seen.append(engine.tokens())
        assert seen[-1] not in seen[:-1]
        engine.assert_generates(checkpoint)
        engine.assert_whole(version)
        assert engine.rpc("wt_addresses") == addresses, "captured graphs would read the old ones"
    assert engine.staging() == "mapped"
    assert trainer.call("generation") == 1
    other = fresh(checkpoint)
    assert other.digests() == engine.digests()
    assert other.tokens() == seen[-1]


def test_pushes_from_the_process_of_the_llm_then_the_same_as_a_fresh_engine(
    engine: Engine, fresh: Callable[[Path], Engine], tmp_path: Path
) -> None:
    model = random_model(engine.shape, seed=0).to("cuda")
    with WeightSync.connect(engine.llm, backend="ipc", source=model) as sync:
        seen = [engine.tokens()]
        for version in (1, 2, 3):
            randomize(model, 10 + version)
            print(sync.push(version))
            save_checkpoint(model, tmp_path / str(version))
            seen.append(engine.tokens())
            assert seen[-1] not in seen[:-1]
            engine.assert_generates(tmp_path / str(version))
            engine.assert_whole(version)
        assert engine.staging() == "mapped"
    other = fresh(tmp_path / "3")
    assert other.digests() == engine.digests()
    assert other.tokens() == seen[-1]


@pytest.mark.parametrize("staging", ["none", "device"])
@pytest.mark.parametrize("verify", ["digest", "bytes"])
def test_each_way_to_stage_and_to_verify_loads_the_same(
    engine: Engine, staging: str, verify: str
) -> None:
    first = engine.trainer()
    first.call("connect")
    first.call("randomize", 20, False)
    first.call("push", 1)
    tokens, digests = engine.tokens(), engine.digests()
    second = engine.trainer()
    options = {"staging": staging, "verify": verify}
    second.call("reconnect", 60.0, None, options, True)
    second.call("randomize", 21, False)
    second.call("push", 1)
    assert engine.digests() != digests
    second.call("randomize", 20, False)
    second.call("push", 2)
    assert engine.staging() == staging
    assert engine.digests() == digests
    assert engine.tokens() == tokens


@pytest.mark.parametrize("how", ["data", "replaced"])
def test_a_parameter_that_gets_other_memory_is_found_there(engine: Engine, how: str) -> None:
    trainer = engine.trainer()
    trainer.call("connect")
    trainer.call("randomize", 30, False)
    trainer.call("push", 1)
    for version in (2, 3):
        trainer.call("move", how)
        trainer.call("scale", -2.0)
        digests = engine.digests()
        trainer.call("push", version)
        assert engine.digests() != digests
        engine.assert_generates(trainer.call("save"))
        engine.assert_whole(version)


# -- B28: what is still queued, and a mapping that is read again -----------------------------------


@pytest.mark.parametrize("where", ["another process", "the process of the LLM"])
def test_B28_each_update_through_one_mapping_is_seen(engine: Engine, where: str) -> None:
    """Kernels that have not begun when push is called write to one tensor, twice and three times."""
    apart = where == "another process"
    expected = random_model(engine.shape, seed=40).to("cuda")
    if apart:
        trainer = engine.trainer()
        trainer.call("connect")
        trainer.call("randomize", 40, False)
        trainer.call(
            "scale", 1.0
        )  # CUDA loads a kernel when it is first used, and waits for others
    else:
        model = random_model(engine.shape, seed=40).to("cuda")
        with torch.no_grad():
            model.get_parameter(SCALED).mul_(1.0)
        sync = WeightSync.connect(engine.llm, backend="ipc", source=model)
    try:
        for version, times in enumerate((1, 2, 3, 1), 1):
            factor = -1.25
            if apart:
                assert trainer.call("scale_late", factor, times), "the kernels had ended"
                trainer.call("push", version)
            else:
                stream = _scale_late(model, factor, times)
                assert not stream.query(), "the kernels had ended: nothing was tested"
                sync.push(version)
            with torch.no_grad():
                for _ in range(times):
                    expected.get_parameter(SCALED).mul_(factor)
            assert engine.rpc("wt_digests")[SCALED] == _digest(expected.get_parameter(SCALED))
            engine.assert_whole(version)
    finally:
        if not apart:
            sync.close()


def _scale_late(model: Any, factor: float, times: int) -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(times):
            torch.cuda._sleep(LONG_CYCLES)
            model.get_parameter(SCALED).mul_(factor)
    return stream


def _digest(tensor: torch.Tensor) -> str:
    """As of `wt_digests`. vLLM has this parameter as it is in the checkpoint."""
    import hashlib

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


# -- B20: engines that sleep -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def sleeper(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    arguments = {"graphs": request.param, "enable_sleep_mode": True}
    with running(tmp_path_factory.mktemp("sleeper"), shape_of("float32"), **arguments) as engine:
        yield engine


@pytest.fixture
def sleeping(sleeper: Engine) -> Iterator[tuple[Engine, IpcTrainer]]:
    """An engine that is awake, with weights of a trainer that has pushed once."""
    trainer = sleeper.trainer()
    trainer.call("connect")
    trainer.call("randomize", 50, False)
    trainer.call("push", 1)
    yield sleeper, trainer
    sleeper.close_trainers()


WOKEN = {"weights": ["weights"], "kv": ["kv_cache"], "all": None}
# Where weights were thrown away (level 2), vLLM 0.26 cannot wake the KV cache before them: it copies
# the model's buffers, too.
LEVELS = [(1, "weights"), (1, "kv"), (1, "all"), (2, "weights"), (2, "all")]


@pytest.mark.parametrize("push_asleep", [False, True], ids=["push after", "push before and after"])
@pytest.mark.parametrize(("level", "woken"), LEVELS)
def test_B20_a_push_into_an_engine_that_sleeps(
    sleeping: tuple[Engine, IpcTrainer], level: int, woken: str, push_asleep: bool
) -> None:
    engine, trainer = sleeping
    old, digests = engine.tokens(), engine.digests()
    checkpoint = trainer.call("randomize", 51)
    engine.llm.sleep(level=level)
    if push_asleep:
        _refused(trainer, 2)
    engine.llm.wake_up(tags=WOKEN[woken])
    if woken == "kv":  # its weights still sleep
        _refused(trainer, 3)
        engine.llm.wake_up(tags=["weights"])
    elif woken == "all" and level == 1:
        assert engine.digests() == digests
        assert engine.tokens() == old
    trainer.call("push", 4)
    if woken == "weights":
        engine.llm.wake_up(tags=["kv_cache"])
    engine.assert_whole(4)
    assert engine.tokens() != old
    engine.assert_generates(checkpoint)
    trainer.call("randomize", 50, False)
    trainer.call("push", 5)
    assert engine.digests() == digests
    assert engine.tokens() == old


def _refused(trainer: IpcTrainer, version: int) -> None:
    with pytest.raises(WrongOrder, match="asleep") as error:
        trainer.call("push", version)
    assert "wake_up" in (error.value.cure or "")
    assert not trainer.call("torn")


@pytest.mark.parametrize("level", [1, 2])
def test_B20_a_trainer_that_connects_while_the_engine_sleeps(
    sleeping: tuple[Engine, IpcTrainer], level: int
) -> None:
    """Connecting, or else the first push, is refused."""
    engine, _ = sleeping
    digests = engine.digests()
    other = engine.trainer()
    engine.llm.sleep(level=level)
    with pytest.raises(WrongOrder, match="asleep"):
        _connect_and_push(other)
    engine.llm.wake_up()
    if level == 1:
        assert engine.digests() == digests
    other.call("reconnect")
    checkpoint = other.call("randomize", 52)
    other.call("push", 1)
    engine.assert_whole(1)
    engine.assert_generates(checkpoint)


def _connect_and_push(trainer: IpcTrainer) -> None:
    trainer.call("reconnect")
    trainer.call("push", 1)


def test_B20_an_engine_that_falls_asleep_between_seal_and_finish(tmp_path: Path) -> None:
    """Its weights have no memory when the commit comes: nothing may be written there."""
    with running(tmp_path, shape_of("float32"), graphs=False, enable_sleep_mode=True) as engine:
        trainer = engine.trainer()
        trainer.call("connect")
        trainer.call("push", 1)
        old, digests = engine.tokens(), engine.digests()
        checkpoint = trainer.call("randomize", 53)
        engine.before["finish_weight_update"] = lambda: engine.llm.sleep(level=1)
        with pytest.raises(WeightTransferError, match="asleep"):
            trainer.call("push", 2)
        engine.llm.wake_up()
        if not trainer.call("torn"):
            assert engine.digests() == digests
            assert engine.tokens() == old
        trainer.call("push", 3)
        engine.assert_whole(3)
        engine.assert_generates(checkpoint)


# -- trainers that die, and allocators that cannot share ---------------------------------------------


def test_B34_the_memory_of_a_trainer_killed_while_idle_comes_back(one_engine: Engine) -> None:
    """A GiB of it, that the worker has mapped: it must not be kept until somebody connects."""
    engine = one_engine
    before = _free(engine)
    trainer = engine.trainer()
    trainer.call("move_into_block", 1024)
    trainer.call("connect")
    trainer.call("push", 1)
    trainer.call("push", 2)  # what is prepared for a second push holds it, too
    old, digests = engine.tokens(), engine.digests()
    assert _free(engine) < before - 1024 * MIB
    assert engine.rpc("wt_held")["imports"] > 0
    trainer.kill()
    wait_until(lambda: _free(engine) > before - SLACK)
    assert engine.rpc("wt_held")["imports"] == 0
    assert engine.digests() == digests
    assert engine.tokens() == old
    second = engine.trainer()
    second.call("connect")
    checkpoint = second.call("randomize", 61)
    second.call("push", 1)
    engine.assert_generates(checkpoint)


def test_a_trainer_killed_within_a_push_leaves_the_old_weights(one_engine: Engine) -> None:
    engine = one_engine
    trainer = engine.trainer()
    trainer.call("connect")
    trainer.call("push", 1)
    old, digests = engine.tokens(), engine.digests()
    trainer.call("randomize", 62, False)
    trainer.call("die_in_push")
    with pytest.raises(PeerDead):
        trainer.call("push", 2)
    trainer.kill()
    wait_until(lambda: engine.rpc("wt_held")["imports"] == 0)
    assert engine.digests() == digests
    assert engine.tokens() == old
    second = engine.trainer()
    second.call("connect")
    checkpoint = second.call("randomize", 63)
    second.call("push", 1)
    engine.assert_generates(checkpoint)


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_B33_memory_that_cannot_be_shared_is_refused_at_connect(
    one_engine: Engine, name: str, setting: str
) -> None:
    """In the trainer, before the engine has heard of it: an earlier trainer stays connected."""
    engine = one_engine
    first = engine.trainer()
    first.call("connect")
    checkpoint = first.call("randomize", 70)
    other = engine.trainer(**{name: setting})
    with pytest.raises(TransportError) as error:
        other.call("connect")
    assert "expandable_segments" in str(error.value.cure)
    assert error.value.where == "expose"
    first.call("push", 1)  # or it would be Superseded
    engine.assert_generates(checkpoint)


def test_B22_a_device_that_is_named_by_its_uuid(one_engine: Engine) -> None:
    """The worker has the same GPU by its index, or by all of them."""
    engine = one_engine
    uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
    for spelling in (f"GPU-{uuid}", f"GPU-{uuid[:8]}"):
        trainer = engine.trainer(CUDA_VISIBLE_DEVICES=spelling)
        trainer.call("reconnect")
        checkpoint = trainer.call("randomize", 71)
        trainer.call("push", 1)
        assert engine.staging() == "mapped"
        engine.assert_generates(checkpoint)
        engine.close_trainers()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_B22_another_gpu_under_the_same_index_is_refused(one_engine: Engine) -> None:
    """Both call theirs cuda:0."""
    engine = one_engine
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    digests = engine.digests()
    trainer = engine.trainer(CUDA_VISIBLE_DEVICES=visible[1])
    with pytest.raises(TransportError, match=r"another GPU|not visible") as error:
        trainer.call("reconnect")
    assert error.value.cure
    assert engine.digests() == digests


# -- memory ----------------------------------------------------------------------------------------

ROUNDS, MOVES, SETTLED = 200, 10, 40


def _held(engine: Engine, trainer: IpcTrainer) -> dict[str, dict[str, int]]:
    """What must not grow, of the worker and of the trainer; the device's free memory last."""
    theirs, ours = engine.rpc("wt_held"), trainer.call("resources")
    trainer.call("free_device_memory")  # it gives back its cache
    return {"worker": theirs, "trainer": ours, "device": {"free": _free(engine)}}


def _free(engine: Engine) -> int:
    return int(engine.rpc("wt_free_device_memory"))


@pytest.mark.slow
def test_B08_two_hundred_rounds_and_exports_that_nobody_opens(one_engine: Engine) -> None:
    """Memory moves in every tenth round; in every twentieth it is exported once more, for nobody."""
    engine = one_engine
    trainer = engine.trainer()
    trainer.call("connect")
    trainer.call("randomize", 80, False)
    for version in range(1, ROUNDS + 1):
        if version % MOVES == 0:
            trainer.call("move_into_block", 32)
        if version % (2 * MOVES) == MOVES // 2:
            trainer.call("move_into_block", 32)
            trainer.call("export")
            trainer.call("move_into_block", 32)
        trainer.call("scale", -1.0)
        trainer.call("push", version)
        if version == SETTLED:
            before = _held(engine, trainer)
    after = _held(engine, trainer)
    print(before, after)
    assert after["device"]["free"] > before["device"]["free"] - SLACK
    for side in ("worker", "trainer"):
        for kind in ("threads", "fds"):
            assert after[side][kind] <= before[side][kind], (side, kind)
        assert after[side]["rss"] < before[side]["rss"] + SLACK
    assert after["worker"]["imports"] <= before["worker"]["imports"]
    engine.assert_generates(trainer.call("save"))


def test_B34_what_was_mapped_is_released_without_the_garbage_collector(one_engine: Engine) -> None:
    """A worker that kept it to the next collection would have more and more of the device's memory."""
    engine = one_engine
    trainer = engine.trainer()
    trainer.call("connect")
    engine.rpc("wt_collect_garbage", False)
    try:
        for version in range(1, 13):
            trainer.call("move_into_block", 128)
            trainer.call("push", version)
            now = _held(engine, trainer)
            if version == 2:
                before = now
            elif version > 2:
                assert now["device"]["free"] > before["device"]["free"] - SLACK
                assert now["worker"]["imports"] <= before["worker"]["imports"]
        trainer.call("disconnect")
        wait_until(lambda: engine.rpc("wt_held")["imports"] == 0)
    finally:
        engine.rpc("wt_collect_garbage", True)


def test_B56_as_many_exports_as_allocations_and_no_address_space_is_used_up(
    one_engine: Engine,
) -> None:
    """Not one for each tensor; and a connection that has ended has left its addresses."""
    engine = one_engine
    trainer = engine.trainer()
    tensors = len(trainer.call("addresses"))
    for connection in range(20):
        trainer.call("connect")
        trainer.call("push", 1)
        now = engine.rpc("wt_held")
        assert 0 < now["imports"] <= trainer.call("device_segments") < tensors
        if connection == 1:
            before = now
    assert now["imports"] == before["imports"]
    assert now["address space"] < before["address space"] + (1 << 30)
    assert now["threads"] <= before["threads"]
    assert now["fds"] <= before["fds"]


def test_a_mapped_push_takes_next_to_no_memory(tmp_path: Path) -> None:
    """On both sides, from before the connection to the end of the second push."""
    shape = ModelShape(hidden=2048, layers=8, vocab=2000, dtype="bfloat16")
    with running(tmp_path, shape, graphs=False) as engine:
        trainer = engine.trainer()
        nbytes = trainer.call("nbytes")
        assert nbytes > 500e6
        ours = trainer.call("device_memory", True)["now"]
        theirs = engine.rpc("wt_device_memory", True)["now"]
        trainer.call("connect")
        for version in (1, 2):
            trainer.call("push", version)
        assert engine.staging() == "mapped"
        extra = {
            "trainer": trainer.call("device_memory")["peak"] - ours,
            "worker": engine.rpc("wt_device_memory", False)["peak"] - theirs,
        }
        print(extra, nbytes)
        assert sum(extra.values()) < nbytes // 100
