"""A read that has timed out must not write later, when its owner wakes up."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_wt.engine import WorkerContext
from vllm_wt.errors import Timeout
from vllm_wt.info import PullInitInfo, PullUpdateInfo
from vllm_wt.pull import PullEngine
from vllm_wt_rdma.transport import NixlTransport

NBYTES = 64 << 20
SENTINEL = 0


def received(engine: PullEngine, info: PullUpdateInfo) -> torch.Tensor:
    found: dict[str, torch.Tensor] = {}
    engine.receive_weights(info, found.update)
    return found["weight"]


@pytest.mark.usefixtures("tcp")
def test_what_a_stopped_owner_would_bring_later_is_never_written(bench: Any) -> None:
    owner = bench.owner()
    context = WorkerContext(backend="rdma", device=torch.device("cpu"), rank=0, size=1)
    engine = PullEngine(context, NixlTransport)

    def opened(version: int, seconds: float = 30.0) -> PullUpdateInfo:
        info = PullUpdateInfo.from_wire(owner.ask("publish", version=version), backend="rdma")
        return replace(info, deadline_s=seconds, handle=None)

    try:
        init = owner.ask("connect", nbytes=NBYTES)
        engine.init_transfer_engine(PullInitInfo.from_wire(init, backend="rdma"))
        assert torch.equal(received(engine, opened(1)), bench.content(NBYTES, 1))
        arena = engine._arena._buffer
        info = opened(2, 1.0)
        owner.signal(signal.SIGSTOP)
        with pytest.raises(Timeout):
            received(engine, info)
        quarantined = list(engine._quarantine)
        arena.fill_(SENTINEL)
        owner.signal(signal.SIGCONT)
        third = opened(3)  # it is awake, and has driven its fabric since
        assert not quarantined
        assert int(arena.max()) == SENTINEL
        assert torch.equal(received(engine, third), bench.content(NBYTES, 3))
    finally:
        engine.shutdown()
