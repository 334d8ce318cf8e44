"""Reported failures (docs/cases.md) on a real vLLM engine, at TP 1 and TP 2."""

from __future__ import annotations

import base64
import itertools
import pickle
import queue
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from trainers import in_background, wait_for
from wt_cases import Touches, TouchesLater, Worker

from vllm_wt import WeightSync
from vllm_wt.clients.local import LocalClient
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    LoadError,
    ManifestMismatch,
    PeerDead,
    TornModel,
    TransportError,
    WeightTransferError,
    WrongOrder,
    from_text,
)
from vllm_wt.info import Handle
from vllm_wt.source import SafetensorsSource
from vllm_wt.testing.engines import greedy_tokens, start_llm
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    randomize,
    reference_tokens,
    save_checkpoint,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_seeds = itertools.count(4000)


class Trainer:
    """A session with a model, in this process."""

    def __init__(self, engine: Any, folder: Any, change: Any = dict) -> None:
        self._engine, self._folder = engine, folder
        self.model = random_model(engine.shape, seed=next(_seeds))
        source = change(dict(self.model.named_parameters()))
        self.sync = WeightSync.connect(engine.llm, backend="rdma", source=source)
        self.versions = itertools.count(1)

    def push(self) -> Any:
        return self.sync.push(next(self.versions))

    def randomize(self) -> Any:
        """New weights; the folder of a checkpoint with them."""
        seed = next(_seeds)
        randomize(self.model, seed)
        save_checkpoint(self.model, self._folder / str(seed))
        return self._folder / str(seed)

    def good_round(self) -> list[list[int]]:
        """One after which the engine generates what transformers does."""
        checkpoint = self.randomize()
        old = self._engine.tokens()
        self.push()
        tokens: list[list[int]] = self._engine.tokens()
        assert tokens == self._engine.reference(checkpoint) != old
        self._engine.assert_in_step()
        return tokens


@pytest.fixture
def trainer(engine, tmp_path):
    trainer = Trainer(engine, tmp_path)
    yield trainer
    trainer.sync.close()


def _assert_whole(engine: Any) -> None:
    assert [s["state"] for s in engine.state()] == ["idle"] * engine.tp
    assert [s["torn"] for s in engine.state()] == [False] * engine.tp
    assert [s["meta"] for s in engine.state()] == [[]] * engine.tp
    engine.assert_in_step()


# B02: a failed update leaves the session open or the model on meta


def test_B02_after_a_failure_it_generates_and_a_full_round_lands(engine, trainer):
    old = trainer.good_round()
    trainer.randomize()
    for phase, error_cls, said in [
        ("open", TransportError, "injected into _open"),
        ("receive", TransportError, "injected into make"),
        ("seal", CorruptTransfer, "The update is not complete"),
    ]:
        engine.fail_once(phase, engine.tp - 1)
        with pytest.raises(error_cls, match=said):
            trainer.push()
        assert not trainer.sync.status()[0].torn
        _assert_whole(engine)
        assert engine.tokens() == old
    trainer.good_round()
    engine.fail_once("apply", 0)
    with pytest.raises(TornModel, match="injected into the commit"):
        trainer.push()
    assert trainer.sync.status()[0].torn
    assert [s["meta"] for s in engine.state()] == [[]] * engine.tp
    engine.tokens()  # it can run, though not with weights of one version
    trainer.good_round()
    _assert_whole(engine)


def test_B02_calls_out_of_turn(engine, trainer):
    old = trainer.good_round()
    update = trainer.sync._members.links[0]._info("open", Deadline(30)).to_wire()
    for calls, error_cls, said in [
        ([("start_weight_update",)] * 2, WrongOrder, "Cannot start a round in state 'started'"),
        ([("finish_weight_update",)], Aborted, "closed before it was sealed"),  # of that start
        ([("finish_weight_update",)], WrongOrder, "Cannot finish in state 'idle'"),
        ([("update_weights", update)], WrongOrder, "Cannot open a transfer in state 'idle'"),
    ]:
        *before, last = calls
        for call in before:
            engine.call(*call)
        with pytest.raises(error_cls, match=said):
            engine.call(*last)
        engine.assert_in_step()
    _assert_whole(engine)
    assert engine.tokens() == old
    trainer.good_round()
    with pytest.raises(WrongOrder, match="Cannot finish in state 'idle'"):
        engine.call("finish_weight_update")  # a second time
    _assert_whole(engine)


# B06: a second load corrupts an MoE


@pytest.mark.xdist_group("servers")
def test_B06_a_mixture_of_experts_pushed_again_and_again(tmp_path, monkeypatch):
    """Its experts are laid out for the kernel, so a plain load into them would be wrong."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    shape = ModelShape(vocab=500)
    ids = prompts(shape, count=3)
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(folders):
        save_checkpoint(_mixture(shape, seed), folder)
    want = [reference_tokens(folder, ids, 8) for folder in folders]
    assert want[0] != want[1]
    llm = start_llm(
        folders[0], shape.dtype, "rdma", worker_extension_cls="wt_faults.FaultExtension"
    )
    try:
        before = llm.collective_rpc("compute_weight_checksums")
        digests = llm.collective_rpc("wt_digests")
        assert greedy_tokens(llm, ids, 8) == want[0]
        for round_, (folder, tokens) in enumerate(
            [(folders[0], want[0]), (folders[0], want[0]), (folders[1], want[1])]
        ):
            source = SafetensorsSource(folder)
            with WeightSync.connect(llm, backend="rdma", source=source) as sync:
                sync.push(1)
            assert greedy_tokens(llm, ids, 8) == tokens
            same = round_ < 2
            assert (llm.collective_rpc("compute_weight_checksums") == before) == same
            assert (llm.collective_rpc("wt_digests") == digests) == same
    finally:
        llm.llm_engine.engine_core.shutdown()


def _mixture(shape: ModelShape, seed: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=shape.vocab,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    randomize(model, seed)
    return model


# B09: names


def _shifted(state: dict[str, Any]) -> dict[str, Any]:
    return {f"policy.{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("change", "error_cls", "said"),
    [
        (lambda s: s | {"model.visual.w": torch.ones(2)}, LoadError, "visual"),
        (lambda s: {n: t for n, t in s.items() if n != NORM}, LoadError, NORM),
        (lambda s: [*s.items(), (NORM, s[NORM])], ManifestMismatch, f"{NORM}' occurs twice"),
        (_shifted, LoadError, "policy"),
        # A name that vLLM's loaders skip: nothing is unknown, and nothing is loaded.
        (
            lambda _: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)},
            LoadError,
            "not or partly covered",
        ),
        (lambda _: {}, ManifestMismatch, "no tensors"),
    ],
    ids=["extra", "missing", "duplicate", "prefix", "none of them used", "none"],
)
def test_B09_names(engine, change, error_cls, said):
    digests = engine.checksums()
    state = dict(random_model(engine.shape, seed=next(_seeds)).named_parameters())
    with pytest.raises(error_cls) as error:
        WeightSync.connect(engine.llm, backend="rdma", source=change(state))
    assert said in str(error.value)
    assert engine.checksums() == digests
    assert [s["meta"] for s in engine.state()] == [[]] * engine.tp
    engine.assert_in_step()
    with WeightSync.connect(engine.llm, backend="rdma", source=state) as sync:
        sync.push(1)
    assert engine.checksums() != digests


# B12: data of a peer is unpickled


def test_B12_a_pickle_in_every_field(engine, trainer, tmp_path):
    marker = tmp_path / "marker"
    payloads = [pickle.dumps(cls(str(marker))) for cls in (Touches, TouchesLater)]
    for payload in payloads:
        pickle.loads(payload)
        assert marker.exists()  # it would
        marker.unlink()
    texts = [base64.b64encode(payload).decode() for payload in payloads]
    text = texts[0]
    init = trainer.sync._trainer.describe(Deadline(5)).to_wire()
    handle = Handle.from_wire(init["handle"], backend="rdma")
    spoilt = [
        init | {name: value}
        for name in init
        for value in (text, payloads[1], [texts[1]], (payloads[0],), {"data": [texts[1]]})
    ]
    spoilt += [
        init | {"ipc_handles_pickled": text},
        init | {"tensors": [init["tensors"][0] | {"name": text}]},
        init | {"tensors": [init["tensors"][0] | {"dtype": text}]},
        init | {"handle": init["handle"] | {"body": text}},
        init | {"handle": Handle.wrap(handle.owner, handle.generation, payload).to_wire()},
        init | {"handle": _with(handle, metadata=text)},
        init | {"handle": _with(handle, buffers=[text])},
    ]
    for info in spoilt:
        with pytest.raises(WeightTransferError):
            engine.init(info)
    assert not marker.exists()
    engine.assert_in_step()
    again = Trainer(engine, tmp_path)
    again.good_round()
    update = again.sync._members.links[0]._info("open", Deadline(30)).to_wire()
    engine.call("start_weight_update")
    for name, value in itertools.product([*update, "update_info", "names"], (texts[1], [payload])):
        with pytest.raises(WeightTransferError):
            engine.call("update_weights", update | {name: value})
    assert not marker.exists()
    engine.assert_in_step()
    again.good_round()
    again.sync.close()


def _with(handle: Handle, **changes: Any) -> dict[str, Any]:
    """The right handle with wrong content, and a checksum that holds."""
    import json

    fields = json.loads(handle.unwrap(backend="rdma")) | changes
    return Handle.wrap(handle.owner, handle.generation, json.dumps(fields).encode()).to_wire()


# B13: the trainer dies, and another one comes


@pytest.mark.slow  # as test_faults has it, in short
def test_B13_killed_before_its_update(engine, tmp_path):
    first = engine.trainer()
    first.call("connect")
    old = engine.tokens()
    engine.call("start_weight_update")
    first.kill()
    assert engine.tokens() == old
    _another_syncs(engine, tmp_path)


def test_B13_killed_in_the_middle_of_its_update(engine, tmp_path):
    first = engine.trainer()
    first.call("connect")
    old = engine.tokens()
    engine.rpc("wt_hold_read")
    first.call("randomize", next(_seeds), False)
    pushing = in_background(lambda: first.call("push", 1))
    wait_for(lambda: all(s["state"] == "receiving" for s in engine.state()))
    first.kill()
    with pytest.raises(PeerDead, match="has gone"):
        pushing.result(30)
    assert engine.tokens() == old  # while the worker still waits for the dead
    engine.rpc("wt_let_go")
    _another_syncs(engine, tmp_path)


def _another_syncs(engine: Any, folder: Any) -> None:
    second = Trainer(engine, folder)
    second.good_round()
    second.sync.close()
    _assert_whole(engine)


# B21: a head that is tied to the embedding


def test_B21_the_head(engine, tmp_path):
    """The engine at TP 2 is tied; the one at TP 1 is not, and must not be taken for it."""
    _heads(engine, tmp_path)


@pytest.fixture
def tied_engine(make_engine):
    yield from make_engine(ModelShape(vocab=500, tied=True), tp=1)


@pytest.mark.slow
def test_B21_the_head_of_a_tied_model_at_tp1(tied_engine, tmp_path):
    _heads(tied_engine, tmp_path)


def _heads(engine: Any, folder: Any) -> None:
    plain = Trainer(engine, folder)
    assert (HEAD in dict(plain.model.named_parameters())) != engine.shape.tied
    plain.good_round()
    if engine.shape.tied:
        with torch.no_grad():  # the embedding alone: a head that stayed would show
            plain.model.get_parameter(EMBEDDING).mul_(-1)
        before = engine.tokens()
        plain.push()
        save_checkpoint(plain.model, folder / "negated")
        assert engine.tokens() == engine.reference(folder / "negated") != before
    plain.sync.close()
    # The head is sent too, with the same values: accepted.
    both = Trainer(engine, folder, lambda state: {HEAD: state[EMBEDDING]} | state)
    both.good_round()
    both.good_round()
    both.sync.close()


def test_B21_a_head_that_differs_from_the_embedding_it_is_tied_to(engine, tmp_path):
    if not engine.shape.tied:
        pytest.skip("its head is not tied")
    other = torch.randn(engine.shape.vocab, engine.shape.hidden)
    trainer = Trainer(engine, tmp_path, lambda state: state | {HEAD: other})
    try:
        with pytest.raises(WeightTransferError, match=HEAD):
            trainer.push()
    finally:
        trainer.sync.close()


# B24: a worker's failure is not looked at


@pytest.mark.slow  # as test_faults has it, in short
def test_B24_every_rank_s_failure_reaches_the_caller(engine, trainer):
    trainer.good_round()
    for phase, rank in itertools.product(["open", "receive", "seal", "apply"], range(engine.tp)):
        engine.fail_once(phase, rank)
        said = "not complete" if phase == "seal" else "injected into"
        with pytest.raises(WeightTransferError, match=said) as error:
            trainer.push()
        if engine.tp > 1:
            assert list(error.value.ranks) == [rank]
        assert (type(error.value) is TornModel) == (phase == "apply")
        engine.assert_in_step()
        assert [s["version"] for s in engine.state()] == [1] * engine.tp  # none commits alone
    trainer.good_round()


# B40: an update while a step runs


@dataclass
class Running:
    """A request, and what was known of it when the last commit was asked for."""

    prompt: int
    born: int
    seen: int = 0
    tokens: tuple[int, ...] = ()


class Calls:
    """A trainer's calls, made by the thread that steps the engine: an ``LLM`` takes one at a time.

    The engine's own process goes on with its requests meanwhile.
    """

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def _call(self, name: str, *args: Any) -> Any:
        future: Future[Any] = Future()
        self._waiting.put((name, args, future))
        return future.result(120)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._call("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def world_size(self) -> int:
        return int(self._call("world_size"))

    def waiting(self) -> tuple[str, tuple[Any, ...], Future[Any]] | None:
        try:
            call: tuple[str, tuple[Any, ...], Future[Any]] = self._waiting.get_nowait()
        except queue.Empty:
            return None
        return call

    def make(self, name: str, args: tuple[Any, ...], future: Future[Any]) -> None:
        try:
            future.set_result(getattr(self._client, name)(*args))
        except Exception as error:
            future.set_exception(error)


def test_B40_pushes_while_32_requests_run(engine, tmp_path):
    """No pause: the commit must fall between two steps, on every rank."""
    from vllm import SamplingParams

    many, length = 32, 48
    ids = prompts(engine.shape, count=4)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    old, new = (random_model(engine.shape, seed=next(_seeds)) for _ in range(2))
    for model, name in ((old, "old"), (new, "new")):
        save_checkpoint(model, tmp_path / name)
    want_old, want_new = (reference_tokens(tmp_path / name, ids, length) for name in ("old", "new"))
    kept = {name: param.detach().clone() for name, param in old.named_parameters()}
    with WeightSync.connect(engine.llm, backend="rdma", source=kept) as sync:
        sync.push(1)
    calls, core = Calls(engine.client), engine.llm.llm_engine
    names = (f"case-{number}" for number in itertools.count())
    running: dict[str, Running] = {}
    done: list[tuple[Running, int]] = []
    caught: list[int] = []
    commits = 0

    def push() -> None:
        with WeightSync.connect(calls, backend="rdma", source=kept) as sync:
            sync.push(1)
            sync.push(2)  # the same weights: nobody may notice
            for name, param in new.named_parameters():
                kept[name].copy_(param.detach())
            sync.push(3)

    pushing = in_background(push)
    while not pushing.done() or running:
        if not pushing.done():
            for _ in range(many - len(running)):
                name = next(names)
                running[name] = Running(int(name.split("-")[1]) % len(ids), commits)
                core.add_request(name, {"prompt_token_ids": ids[running[name].prompt]}, params)
        for output in core.step():
            request = running[output.request_id]
            request.tokens = tuple(output.outputs[0].token_ids)
            if output.finished:
                assert output.outputs[0].finish_reason == "length"
                done.append((running.pop(output.request_id), commits))
        # The commit waits for requests that have begun, so that it comes in the midst of them.
        if (call := calls.waiting()) is not None:
            if call[0] == "finish_weight_update":
                for request in running.values():
                    request.seen = len(request.tokens)
                caught.append(sum(request.seen > 0 for request in running.values()))
            calls.make(*call)
            commits += call[0] == "finish_weight_update"
    pushing.result(0)
    assert commits == 3
    assert min(caught) > 0, "no request was running at a commit"
    assert {len(request.tokens) for request, _ in done} == {length}
    across = [request for request, ended in done if request.born < 3 <= ended]
    for request, ended in done:
        if ended < 3:
            assert list(request.tokens) == want_old[request.prompt]
        elif request.born == 3:
            assert list(request.tokens) == want_new[request.prompt]
    # Those in between are what the old model begins and the new one goes on with, at one token.
    mixed = {request.tokens: request for request in across}
    assert mixed
    for request in list(mixed.values())[:4]:
        tokens, prompt = list(request.tokens), ids[request.prompt]
        same = 0  # leading tokens that could be the old model's
        while same < length and tokens[same] == want_old[request.prompt][same]:
            same += 1
        assert same >= request.seen
        assert any(
            tokens == _switched(old, new, prompt, length, count)
            for count in range(same, request.seen - 1, -1)
        )
    with WeightSync.connect(engine.llm, backend="rdma", source=new) as sync:
        assert sync.status()[0].version is None
    assert greedy_tokens(engine.llm, ids, length) == want_new
    _assert_whole(engine)


@torch.inference_mode()
def _switched(old: Any, new: Any, prompt: list[int], length: int, count: int) -> list[int]:
    """Greedy tokens by transformers, of which one model makes the first ``count``."""
    ids, cache, tokens = prompt, None, []
    for made in range(length):
        out = (old if made < count else new)(
            torch.tensor([ids]), past_key_values=cache, use_cache=True
        )
        cache, ids = out.past_key_values, [int(out.logits[0, -1].argmax())]
        tokens += ids
    return tokens


# B46: draft models


def test_B46_a_draft_update_is_refused(engine, trainer):
    old = trainer.good_round()
    digests = engine.rpc("wt_digests")
    with pytest.raises(Exception, match="WT-E02") as raised:
        engine.rpc("start_draft_weight_update")
    error = from_text(str(raised.value), where="draft")
    assert type(error) is WrongOrder
    assert "draft models are not supported" in error.cure
    if engine.tp > 1:
        assert sorted(error.ranks) == list(range(engine.tp))
    _assert_whole(engine)
    state = dict(trainer.model.named_parameters()) | {"mtp.fc.weight": torch.ones(4, 4)}
    with pytest.raises(LoadError, match="mtp"):  # nor are its weights taken for the target's
        WeightSync.connect(engine.llm, backend="rdma", source=state)
    assert engine.rpc("wt_digests") == digests
    assert engine.tokens() == old
    trainer.good_round()


# B51: the engine's configuration is not set while weights are loaded


def test_B51_loaders_see_the_configuration(monkeypatch):
    """On a thread of ours, as a worker's call would be, with vLLM's reload and no engine."""
    monkeypatch.setenv("VLLM_WT_APPLY", "reload")  # the loaders run at each commit
    from vllm.config import VllmConfig, get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from vllm_wt.bridge.loader import ModelWeights

    seen = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(4, 4, bias=False)

        def load_weights(self, weights: Any) -> None:
            seen.append(get_current_vllm_config_or_none())
            for _, tensor in weights:
                loader = getattr(self.proj.weight, "weight_loader", default_weight_loader)
                loader(self.proj.weight, tensor)

    config, device = VllmConfig(), torch.device("cpu")
    model = Model()
    record_metadata_for_reloading(model)
    worker = Worker(model=ModelWeights(model, config, device))
    source = {"proj.weight": torch.rand(4, 4)}

    def update() -> None:
        with WeightSync.connect(worker, backend="rdma", source=source) as sync:
            sync.push(1)

    in_background(update).result(60)
    assert len(seen) == 2  # the rehearsal and the commit
    assert all(each is config for each in seen)
    assert get_current_vllm_config_or_none() is None
    assert torch.equal(model.proj.weight, source["proj.weight"])
    worker.round.shutdown()
