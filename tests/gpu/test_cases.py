"""Reported failures (docs/cases.md) that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from wt_cases import Worker

from vllm_wt import WeightSync
from vllm_wt.testing.models import reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_LONG_CYCLES = 200_000_000
"""About a tenth of a second of a stream that does nothing else."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("cuda:0")
    yield worker
    worker.round.shutdown()


@pytest.mark.parametrize("where", ["current stream", "side stream"])
@pytest.mark.parametrize("form", ["plain", "strided"])
def test_B11_what_is_queued_is_waited_for(worker: Worker, where: str, form: str) -> None:
    """The weights are written by kernels that have not begun when push is called."""
    base = torch.zeros(512, 1024, device="cuda:0")
    source = {"a": base if form == "plain" else base.t(), "b": torch.zeros(7, device="cuda:0")}
    stream = torch.cuda.current_stream() if where == "current stream" else torch.cuda.Stream()
    with WeightSync.connect(worker, backend="rdma", source=source) as sync:
        for version in range(1, 6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_LONG_CYCLES)
                for tensor in source.values():
                    tensor.fill_(version)
            assert not stream.query(), "the kernels had ended: nothing was tested"
            sync.push(version)
            for name, tensor in source.items():
                # On a stream of its own, which waits for none of the others.
                with torch.cuda.stream(torch.cuda.Stream()):
                    got = worker.received[name]
                    assert got.shape == tensor.shape
                    assert (got.min().item(), got.max().item()) == (version, version), name


def test_B11_copies_of_strided_tensors_outlive_the_read(worker: Worker) -> None:
    """A temporary copy that is freed while it is read would be written over by these allocations."""
    base = torch.zeros(256, 512, device="cuda:0")
    source = {str(index): (base + index).t() for index in range(8)}
    with WeightSync.connect(worker, backend="rdma", source=source) as sync:
        for version in range(1, 6):
            for tensor in source.values():
                tensor.add_(1)
            torch.cuda._sleep(_LONG_CYCLES)
            churn = [torch.full((256, 512), -1.0, device="cuda:0") for _ in range(32)]
            del churn
            sync.push(version)
            got = [worker.received[name].unique().tolist() for name in source]
            assert got == [[index + version] for index in range(8)]


@pytest.mark.engine
def test_B19_captured_graphs_run_with_the_new_weights(engine: Any) -> None:
    """A graph reads where the parameters were when it was captured; eager mode would hide a move."""
    if not engine.setting.graphs:
        pytest.skip("this engine captures no graphs")
    assert engine.graphs
    addresses = engine.rpc("wt_addresses")
    trainer = engine.trainer()
    trainer.call("connect")
    seen = [engine.tokens()]
    for version in (1, 2, 3):
        checkpoint = trainer.call("randomize", 4000 + version)
        trainer.call("push", version)
        assert engine.rpc("wt_addresses") == addresses
        seen.append(engine.tokens())
        assert seen[-1] not in seen[:-1]
        if engine.setting.dtype == "float32":
            assert seen[-1] == reference_tokens(Path(checkpoint), engine.prompts, len(seen[-1][0]))
