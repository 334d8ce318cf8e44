"""Models with uneven shards, with experts, or in several engines, from a trainer of many ranks."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from mixture import VOCAB, mixture
from processes import Forker, Group

from vllm_wt.clients.local import LocalClient
from vllm_wt.clients.relay import RelayServer, engine_methods
from vllm_wt.testing.engines import greedy_tokens, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400), pytest.mark.xdist_group("sharded")]

SCRIPT = Path(__file__).parents[1] / "support" / "wt_sharded.py"
NEW_TOKENS = 8
OVER = ("rdma", "ipc", "nccl_p2p")
UNEVEN = ModelShape(vocab=257, tied=True)
"""Three ranks have 86, 86 and 85 rows of the vocabulary; of two workers, which vLLM pads to 160 rows
each, the second has 97."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    forker = Forker(tmp_path_factory.mktemp("models"), SCRIPT)
    yield forker
    forker.close()


class Served:
    """An `LLM` of this process, which a trainer reaches by a socket."""

    def __init__(self, folder, model, dtype, tp, vocab):
        self.folder, self.path = folder, str(folder / "engine.sock")
        self._prompts = prompts(ModelShape(vocab=vocab), count=3)
        save_checkpoint(model, folder / "seed0")
        self._llm = start_llm(folder / "seed0", dtype, "sharded", tp=tp)
        self._server = RelayServer(Path(self.path), engine_methods(LocalClient(self._llm)))

    def tokens(self):
        return greedy_tokens(self._llm, self._prompts, NEW_TOKENS)

    def reference(self, model, name):
        """What transformers generates."""
        save_checkpoint(model, self.folder / name)
        return reference_tokens(self.folder / name, self._prompts, NEW_TOKENS)

    def close(self):
        self._server.close()
        self._llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts engines."""
    with ExitStack() as stack:

        def start(model, *, tp, vocab, name="engine"):
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(tp))))
            (tmp_path / name).mkdir()
            served = Served(tmp_path / name, model, "float32", tp, vocab)
            return stack.enter_context(closing(served))

        yield start


class Trainer:
    """Its ranks; ``model`` makes what they have together, of a seed."""

    def __init__(self, forker, world, engines, model, *make):
        self._group = Group(forker, "sharded", world, None)
        self._engines, self._model = engines, model
        self._group.all(*make)

    def connect(self, **options):
        paths = ",".join(engine.path for engine in self._engines)
        self._group.all("connect_together", paths, "sharded", options)

    def assert_syncs(self, version, seed):
        """Every engine generates what transformers does with all of the weights."""
        before = [engine.tokens() for engine in self._engines]
        expected = [engine.reference(self._model(seed), f"seed{seed}") for engine in self._engines]
        self._group.all("fill", seed)
        self._group.push(version)
        assert [engine.tokens() for engine in self._engines] == expected
        assert all(old != new for old, new in zip(before, expected, strict=True))

    def close(self):
        for rank in self._group.ranks:
            rank.close()


def _of_shape(shape, seed):
    model = random_model(shape, seed=0)
    randomize(model, seed)
    return model


def _assert_syncs_over_each(forker, world, engines, model, *make):
    for number, over in enumerate(OVER):
        with closing(Trainer(forker, world, engines, model, *make)) as trainer:
            trainer.connect(over=over)
            for version in (1, 2):
                trainer.assert_syncs(version, 10 * (number + 1) + version)


def test_experts_of_two_ranks(forker, serve):
    """Each has half of them, and all else."""
    engine = serve(mixture(0), tp=2, vocab=VOCAB)
    make = "make_of_checkpoints", "experts", str(engine.folder)
    _assert_syncs_over_each(forker, 2, [engine], mixture, *make)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_vocabulary_of_three_uneven_shards_that_is_tied_and_padded(forker, serve, tp):
    engine = serve(random_model(UNEVEN, seed=0), tp=tp, vocab=UNEVEN.vocab)
    model = partial(_of_shape, UNEVEN)
    _assert_syncs_over_each(forker, 3, [engine], model, "make_model", "fsdp2", asdict(UNEVEN))


@pytest.mark.slow
def test_two_engines(forker, serve):
    shape = ModelShape(vocab=500)
    engines = [
        serve(random_model(shape, seed=0), tp=1, vocab=shape.vocab, name=name)
        for name in ("first", "second")
    ]
    model = partial(_of_shape, shape)
    _assert_syncs_over_each(forker, 2, engines, model, "make_model", "fsdp2", asdict(shape))


@pytest.mark.slow
def test_four_ranks_and_two_workers(forker, serve):
    shape = ModelShape(vocab=500)
    engine = serve(random_model(shape, seed=0), tp=2, vocab=shape.vocab)
    model = partial(_of_shape, shape)
    _assert_syncs_over_each(forker, 4, [engine], model, "make_model", "fsdp2", asdict(shape))
