"""Two engines of one session, and a trainer's side that notes what it is asked."""

from __future__ import annotations

import torch

from core.tests.conftest import DictLoader
from core.tests.support.engines import PausingEngine, assert_equal
from vllm_wt.errors import TransportError
from vllm_wt.pull import PullTrainer
from vllm_wt.results import EngineStatus


class Trainer(PullTrainer):
    """Notes what it is asked; ``fails`` are errors of calls to come, ``sending`` is done in send."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []
        self.fails: dict[str, BaseException] = {}
        self.sending = lambda readers, deadline, watch: None

    def _note(self, call):
        self.calls.append(call)
        if call in self.fails:
            raise self.fails.pop(call)

    def publish(self, version, deadline):
        self._note("publish")
        super().publish(version, deadline)

    def serve(self, stop):
        self._note("serve")
        super().serve(stop)

    def send(self, readers, deadline, watch):
        self._note("send")
        self.sending(readers, deadline, watch)
        super().send(readers, deadline, watch)

    def settle(self):
        super().settle()
        self._note("settle")


class Pair:
    """Two engines of one session, which has pushed version 1."""

    def __init__(self, connect, transport_cls) -> None:
        self.source = {"a": torch.arange(12.0), "b": torch.ones(3)}
        self.loaders = [DictLoader(), DictLoader()]
        self.engines = [PausingEngine(transport_cls, loader) for loader in self.loaders]
        self.calls: list[str] = []
        for index, engine in enumerate(self.engines):
            engine.calls = _Named(self.calls, index)
        self.sync = connect(self.engines, self.source)
        self.trainer = self.sync._trainer
        self.sync.push(1)
        self.old = [dict(loader.weights) for loader in self.loaders]
        self.calls.clear()
        self.trainer.calls.clear()
        self.source["a"].add_(1)

    def assert_old(self) -> None:
        for loader, old in zip(self.loaders, self.old, strict=True):
            assert_equal(loader.weights, old)
        assert [engine.paused for engine in self.engines] == [False, False]
        assert self.sync.status() == [EngineStatus(f"engine{n}", 1, False) for n in range(2)]

    def assert_good_round(self, version=2) -> None:
        self.sync.push(version)
        for loader in self.loaders:
            assert_equal(loader.weights, self.source)
        assert [engine.paused for engine in self.engines] == [False, False]


class _Named:
    """One list of what several engines are asked, by their numbers."""

    def __init__(self, calls, index) -> None:
        self._calls = calls
        self._index = index
        self.meet = {}
        """What is waited for within a call."""

    def append(self, name) -> None:
        self._calls.append(f"{name}{self._index}")
        if name in self.meet:
            self.meet.pop(name).wait()


def fail_to_receive(engine):
    """Once."""

    def receive(info, load_weights):
        del engine.receive_weights
        raise TransportError("cable")

    engine.receive_weights = receive
