"""A real HTTP server; what it holds is asked without any of our own clients."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainers import Trainer

from vllm_wt.clients.http import HttpClient
from vllm_wt.testing.models import (
    ModelShape,
    prompts,
    random_model,
    reference_tokens,
    save_checkpoint,
)
from vllm_wt.testing.servers import Server, ask_http, greedy_tokens_http, start_server

NEW_TOKENS = 8


class HttpEngine:
    """A server on a random model, and what a test asks of it."""

    def __init__(self, server: Server, folder: Path, shape: ModelShape, tp: int) -> None:
        self.folder = folder
        self.shape = shape
        self.tp = tp
        self.url = server.url
        self.process = server.process
        self._prompts = prompts(shape, count=3)
        self._trainers: list[Trainer] = []

    @property
    def target(self) -> str:
        """What ``WeightSync.connect`` takes."""
        return self.url

    def call(self, method: str, *args: Any) -> None:
        """One of vLLM's own methods."""
        with HttpClient(self.url) as client:
            getattr(client, method)(*args)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; the answers by rank."""
        body = {"method": method, "args": [str(arg) for arg in args]}
        answers: list[Any] = ask_http(self.url, "/collective_rpc", body)["results"]
        return answers

    def trainer(self) -> Trainer:
        """A trainer process, which connects with ``call("connect", seconds, url)``."""
        self._trainers.append(Trainer(self.folder, self.shape))
        return self._trainers[-1].wait_ready()

    def state(self) -> list[dict[str, Any]]:
        return self.rpc("wt_state")

    def assert_in_step(self) -> None:
        """The server is healthy, and each rank's reply is the one to this call."""
        assert ask_http(self.url, "/health") is None
        nonce = uuid.uuid4().hex
        assert self.rpc("wt_echo", nonce) == [[rank, nonce] for rank in range(self.tp)]
        self.checksums()

    def close_trainers(self) -> None:
        for trainer in self._trainers:
            trainer.close()
        self._trainers = []

    def tokens(self) -> list[list[int]]:
        return greedy_tokens_http(self.url, self._prompts, NEW_TOKENS)

    def reference(self, checkpoint: str | Path) -> list[list[int]]:
        """What transformers generates from a checkpoint."""
        return reference_tokens(Path(checkpoint), self._prompts, NEW_TOKENS)

    def version(self) -> str:
        return str(ask_http(self.url, "/weight_info")["weight_version"])

    def checksums(self) -> dict[str, str]:
        """vLLM's own digests of every rank's parameters."""
        answer: Any = ask_http(self.url, "/weight_checker", {"action": "checksum"})
        checksums: dict[str, str] = answer["checksums"]
        ranks = {name.split(":")[3] for name in checksums}
        assert ranks == {f"tp{rank}" for rank in range(self.tp)}
        return checksums


@contextmanager
def http_engine(folder: Path, shape: ModelShape, tp: int) -> Iterator[HttpEngine]:
    save_checkpoint(random_model(shape, seed=0), folder / "seed0")
    cores = "|".join(str(rank) for rank in range(tp))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores}
    with start_server(
        folder / "seed0",
        shape.dtype,
        "rdma",
        tp=tp,
        env=environment,
        extra_args=["--worker-extension-cls", "wt_faults.FaultExtension"],
    ) as server:
        yield HttpEngine(server, folder, shape, tp)
