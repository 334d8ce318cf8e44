"""The article's code for vLLM's ``nccl`` backend, with other imports: an engine and its trainer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from native_trainers import NativeTrainer
from trainers import wait_for

from vllm_wt.deadline import Deadline
from vllm_wt.testing.models import random_model
from vllm_wt_nccl.native_keys import ROUND, SESSION
from vllm_wt_nccl.rendezvous import Rendezvous

HOST = "127.0.0.1"
INIT = """
from vllm_wt_nccl import NCCLWeightTransferEngine

group = NCCLWeightTransferEngine.trainer_init(
    dict(
        master_address=master_address,
        master_port=master_port,
        world_size=world_size,
        **init,
    )
)
"""
SEND = """
from vllm_wt_nccl import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

trainer_args = NCCLTrainerSendWeightsArgs(group=group, **send)
NCCLWeightTransferEngine.trainer_send_weights(
    iterator=(item for item in model.named_parameters() if item[0] in names),
    trainer_args=trainer_args,
)
"""


class Native:
    """An engine and its trainer, each driven by its own calls.

    Args:
        engine: With ``init`` and ``call`` for vLLM's methods.
        folder: For scripts and checkpoints.
        trainers: Those that live; whoever has them closes them.
        device: Of the trainer.
    """

    def __init__(
        self, engine: Any, folder: Path, trainers: list[NativeTrainer], device: str = "cpu"
    ) -> None:
        self.engine = engine
        self._device = device
        self._folder = folder
        self._trainers = trainers
        self._lost: list[NativeTrainer] = []
        parameters = dict(random_model(engine.shape, seed=0).named_parameters())
        self.rows = [
            (name, str(tensor.dtype).split(".")[-1], list(tensor.shape))
            for name, tensor in parameters.items()
        ]
        for name, code in (("init", INIT), ("send", SEND)):
            (folder / f"{name}.py").write_text(code)
        self.trainer = self._a_trainer()

    def _a_trainer(self) -> NativeTrainer:
        """One that lives, of an earlier test maybe: to start one takes seconds."""
        if not self._trainers:
            self._trainers.append(NativeTrainer(self._folder, self.engine.shape, self._device))
            self._trainers[0].call("ready")
        return self._trainers[0]

    def lose_trainer(self, end: str) -> None:
        """It is killed or stopped."""
        self._trainers.remove(self.trainer)
        self._lost.append(self.trainer)
        getattr(self.trainer, end)()

    def close(self) -> None:
        for trainer in self._lost:
            trainer.close()

    def begin(self, script: str, **names: Any) -> None:
        self.trainer.call("let", **names)
        self.trainer.begin("run", str(self._folder / f"{script}.py"))

    def init_engine(self, port: int, **changes: Any) -> None:
        info = {"master_address": HOST, "master_port": port, "rank_offset": 1}
        self.engine.init(info | {"world_size": 1 + self.engine.tp, "deadline_s": 60.0} | changes)

    def begin_trainer(self, port: int, world_size: int | None = None, **init: Any) -> None:
        size = world_size or 1 + self.engine.tp
        self.begin("init", master_address=HOST, master_port=port, world_size=size, init=init)

    def connect(self) -> None:
        self.port = free_port()
        self.begin_trainer(self.port)
        self.init_engine(self.port)
        self.trainer.answer()

    def wait_for_round(self, number: int) -> None:
        """Until the trainer has begun it, and waits for the workers."""
        deadline = Deadline(60)
        rendezvous = Rendezvous.join(SESSION, HOST, self.port, deadline)
        wait_for(lambda: rendezvous.add(ROUND, 0, deadline) == number)

    def begin_send(self, names: list[str] | None = None, **send: Any) -> None:
        names = [name for name, _, _ in self.rows] if names is None else names
        self.begin("send", names=names, send=send)

    def update(self, names: list[str] | None = None, **update: Any) -> None:
        rows = [row for row in self.rows if names is None or row[0] in names]
        info = {
            "names": [name for name, _, _ in rows],
            "dtype_names": [dtype for _, dtype, _ in rows],
            "shapes": [shape for _, _, shape in rows],
        }
        self.engine.call("update_weights", info | update)

    def push(self, **how: Any) -> None:
        self.begin_send(**how)
        self.engine.call("start_weight_update")
        self.update(**how)
        self.engine.call("finish_weight_update")
        self.trainer.answer()

    def assert_works(self, seed: int) -> None:
        """The same engine, and a new group."""
        self.trainer = self._a_trainer()
        self.connect()
        checkpoint = self.trainer.call("randomize", seed)
        self.push(packed=True)
        assert self.engine.tokens() == self.engine.reference(checkpoint)
        self.engine.assert_in_step()


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
