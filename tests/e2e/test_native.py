"""An engine in vLLM's own form, of a package of a third party, driven by vLLM's four calls."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt import WeightSync, registry
from vllm_wt.clients.local import LocalClient
from vllm_wt.errors import InvalidInfo, LoadError, Timeout, TransportError, WrongOrder, from_text
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

NAME = "my_weight_transfer"
NEW_TOKENS = 8
PLUGIN = f"""
from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    return BackendSpec(
        name={NAME!r},
        kind=Kind.NATIVE,
        native="wt_article:MyWeightTransferEngine",
        capabilities=frozenset({{Capability.CPU}}),
        summary="weights as a file",
        contract=1,
    )
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package, for this process and the engine's."""
    site = tmp_path_factory.mktemp("site")
    (site / "article_plugin.py").write_text(PLUGIN)
    info = site / "article-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: article\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{NAME} = article_plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
        registry.default.cache_clear()
        yield
    registry.default.cache_clear()
    for name in ("article_plugin", "wt_article"):
        sys.modules.pop(name, None)


class Article:
    """An engine, its trainer, and what a test asks of both."""

    def __init__(self, folder: Path, tp: int) -> None:
        from wt_article import MyWeightTransferEngine

        self.tp = tp
        self.folder = folder
        self.shape = ModelShape(vocab=500, tied=tp == 2)
        self.model = random_model(self.shape, seed=0)
        self._numbers = itertools.count()
        self._prompts = prompts(self.shape, count=3)
        self._send = MyWeightTransferEngine.trainer_send_weights
        save_checkpoint(self.model, folder / "start")
        self.llm = start_llm(
            folder / "start",
            self.shape.dtype,
            NAME,
            tp=tp,
            worker_extension_cls="wt_faults.FaultExtension",
        )

    def new_weights(self, seed: int) -> tuple[dict[str, Any], Path]:
        """A training step: an update info for all of it, and a checkpoint to compare with."""
        randomize(self.model, seed)
        number = next(self._numbers)
        file = f"{number}.safetensors"
        names = self._send(
            iterator=self.model.named_parameters(), trainer_args={"file": self.folder / file}
        )
        save_checkpoint(self.model, self.folder / str(number))
        return {"file": file, "names": names}, self.folder / str(number)

    def init(self, **init_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with _typed():
            self.llm.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=dict(folder=str(self.folder), **init_info))
            )

    def push(self, *update_infos: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with _typed():
            self.llm.start_weight_update()
            for update_info in update_infos:
                self.llm.update_weights(
                    WeightTransferUpdateRequest(update_info=dict(**update_info))
                )
            self.llm.finish_weight_update()

    def tokens(self) -> list[list[int]]:
        return greedy_tokens(self.llm, self._prompts, NEW_TOKENS)

    def reference(self, checkpoint: Path) -> list[list[int]]:
        return reference_tokens(checkpoint, self._prompts, NEW_TOKENS)

    def digests(self) -> list[dict[str, str]]:
        return self.llm.collective_rpc("wt_digests")

    def assert_in_step(self) -> None:
        nonce = f"nonce {next(self._numbers)}"
        answers = self.llm.collective_rpc("wt_echo", args=(nonce,))
        assert answers == [[rank, nonce] for rank in range(self.tp)]

    def assert_untouched(self, digests: list[dict[str, str]]) -> None:
        """After a failure: the old weights, the ranks in step, and the next round as any other."""
        assert self.digests() == digests
        self.assert_in_step()
        assert [(told["state"], told["torn"]) for told in LocalClient(self.llm).reports()] == [
            ("idle", False)
        ] * self.tp
        update_info, checkpoint = self.new_weights(next(self._numbers))
        self.push(update_info)
        assert self.tokens() == self.reference(checkpoint)


@contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise from_text(str(error), where="the engine") from error


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["tp1", "tp2"]
)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, installed: None
) -> Iterator[Article]:
    with pytest.MonkeyPatch.context() as patch:
        binding = "|".join(str(rank) for rank in range(request.param))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
        article = Article(tmp_path_factory.mktemp("article"), request.param)
        yield article
        article.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def article(shared: Article) -> Article:
    shared.init()
    return shared


def test_the_articles_calls_bring_new_weights(article):
    seen = [article.tokens()]
    for seed in (1, 2):
        update_info, checkpoint = article.new_weights(seed)
        article.push(update_info)
        tokens = article.tokens()
        assert tokens == article.reference(checkpoint)
        assert tokens not in seen
        seen.append(tokens)
        article.assert_in_step()


def test_in_parts(article):
    update_info, checkpoint = article.new_weights(11)
    names = update_info["names"]
    article.push(*({**update_info, "names": names[part::3]} for part in range(3)))
    assert article.tokens() == article.reference(checkpoint)


def test_a_receive_that_fails_on_one_rank_leaves_the_weights(article):
    before = article.digests()
    update_info, _ = article.new_weights(21)
    for rank in range(article.tp):
        with pytest.raises(TransportError, match="OSError: injected") as error:
            article.push(update_info | {"fail_on": rank})
        assert error.value.backend == NAME
        if article.tp > 1:
            assert list(error.value.ranks) == [rank]
        with pytest.raises(WrongOrder), _typed():
            article.llm.finish_weight_update()
        assert article.digests() == before
    article.assert_untouched(before)


def test_a_receive_that_stalls_on_one_rank_ends_in_time(article):
    before = article.digests()
    update_info, _ = article.new_weights(31)
    with pytest.raises(Timeout, match="update_weights is not done"):
        article.push(update_info | {"stall_on": 0, "deadline_s": 1.0})
    article.assert_untouched(before)


def test_weights_that_are_not_all_there_are_refused(article):
    before = article.digests()
    update_info, _ = article.new_weights(41)
    with pytest.raises(LoadError, match="would keep their old values") as error:
        article.push(update_info | {"names": update_info["names"][:-1]})
    assert error.value.cure == "send every tensor of the checkpoint"
    article.assert_untouched(before)


def test_wrong_infos_are_refused(article):
    before = article.digests()
    update_info, _ = article.new_weights(51)
    with pytest.raises(InvalidInfo, match="MyInitInfo has no field 'session'") as error:
        article.init(session="s1")
    assert (error.value.backend, error.value.where) == (NAME, "session")
    with pytest.raises(InvalidInfo, match="MyUpdateInfo lacks the field 'names'"):
        article.push({"file": update_info["file"]})
    article.assert_untouched(before)


def test_what_the_trainer_is_told(article, tmp_path):
    """By the class that vLLM has for it, and by `WeightSync`."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    seen = WeightTransferEngineFactory._registry[NAME]()
    sent = seen.trainer_send_weights(
        iterator=iter([("a", torch.ones(2))]), trainer_args={"file": tmp_path / "a.safetensors"}
    )
    assert sent == ["a"]
    with pytest.raises(InvalidInfo, match="no side for WeightSync") as error:
        WeightSync.connect(article.llm, backend=NAME, source=article.model)
    assert "init_weight_transfer_engine" in error.value.cure
