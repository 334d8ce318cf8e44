"""Engines in this process: vLLM's four methods over a worker's round, and a session to them."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from vllm_wt import opening
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import NotPaused, WeightTransferError, to_text
from vllm_wt.packing import as_bytes
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.ranks import SingleRank
from vllm_wt.round import WorkerRound
from vllm_wt.session import WeightSync


class Weights(dict[str, torch.Tensor]):
    """Not shown when a test fails: that would read memory which the test may have freed."""

    def __repr__(self):
        return f"Weights of {list(self)}"


class InProcessEngine:
    """vLLM's four methods over a round; errors cross as text, as they do in vLLM."""

    def __init__(self, transport_cls, loader) -> None:
        context = WorkerContext(backend="memory", device=torch.device("cpu"), rank=0, size=1)
        self.engine = PullEngine(context, transport_cls)
        self.round = WorkerRound(self.engine, loader, SingleRank())
        self.calls: list[str] = []

    def _call(self, name, step, *args):
        self.calls.append(name)
        try:
            step(*args)
        except WeightTransferError as error:
            raise RuntimeError(f"Worker failed with error '{to_text(error)}', please") from None

    def init_weight_transfer_engine(self, init_info):
        self._call("init", self.round.init, init_info)

    def start_weight_update(self):
        self._call("start", self.round.start)

    def update_weights(self, update_info):
        self._call(update_info["op"], self.round.update, update_info)

    def finish_weight_update(self, weight_version=None):
        self._call("finish", self.round.finish)

    def world_size(self):
        return 1


class PausingEngine(InProcessEngine):
    """One that can be paused; ``fails`` are errors of calls to come, by name.

    With ``streams`` it stands in for a worker that loads while it receives: it mixes two versions
    from open to finish, and so refuses to open unless it is paused.
    """

    def __init__(self, transport_cls, loader, *, streams=False) -> None:
        super().__init__(transport_cls, loader)
        self.paused = False
        self.streams = streams
        self.fails: dict[str, BaseException] = {}

    def _call(self, name, step, *args):
        error = self.fails.pop(name, None)
        if error is not None:
            self.calls.append(name)
            raise error
        super()._call(name, step, *args)

    def update_weights(self, update_info):
        if update_info["op"] != "open" or not self.streams:
            super().update_weights(update_info)
            return
        self._call("open", self._open_streamed, update_info)

    def _open_streamed(self, info):
        if not info["paused"]:
            raise NotPaused("This engine loads while it receives", cure="pause it")
        assert self.paused or getattr(self, "idle_between_calls", False)
        self.round.update(info)
        self.round.torn = True

    def pause(self):
        self.paused = True  # vLLM is, even if it then says that it could not
        self._call("pause", lambda: None)

    def resume(self):
        self._call("resume", lambda: None)
        self.paused = False

    def is_paused(self):
        return self.paused


class RoundEngine(PausingEngine):
    """One that generates nothing between calls, and takes a round in one.

    ``told`` stands in for what its workers say of it.
    """

    idle_between_calls = True
    pause = resume = is_paused = None

    def __init__(self, transport_cls, loader) -> None:
        super().__init__(transport_cls, loader)
        self.told = [{"wire": 1e-9, "load": 2e-9}]
        self.versions: list[str] = []

    def run_round(self, update_info, weight_version):
        self._call("round", self._whole, update_info)
        self.versions.append(weight_version)
        return self.told

    def _whole(self, update_info):
        self.round.start()
        self.round.update(update_info)
        self.round.finish()


def assert_equal(received, sent) -> None:
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].shape == tensor.shape
        assert torch.equal(
            as_bytes(received[name]), as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
        ), name


@contextmanager
def connecting(monkeypatch, transport_cls, trainer_cls=PullTrainer):
    """``WeightSync.connect`` with the memory fabric as its backend."""
    monkeypatch.setattr(
        opening,
        "trainer_engine",
        lambda backend, source, **options: trainer_cls(
            source, backend=backend, transport_cls=transport_cls, **options
        ),
    )
    opened = []

    def connect(engines, source, **options):
        sync = WeightSync.connect(engines, backend="memory", source=source, **options)
        opened.append(sync)
        return sync

    try:
        yield connect
    finally:
        for sync in opened:
            sync.close()
