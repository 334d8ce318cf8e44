"""What a fabric may bring wrong, or late: seen before anything is loaded."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.errors import Aborted, CorruptTransfer
from vllm_wt.pull.exposure import DIGESTED
from vllm_wt.source import StateDictSource
from vllm_wt.transport import Progress

from .conftest import MemoryTransport
from .test_pull_ring import Made, Reader, made_trainer, nothing

SIZE = 10 * BLOCK + 24


class Faulty(MemoryTransport):
    """Does to the arena, once, what ``fault`` does."""

    fault: ClassVar[Any] = None
    claims: ClassVar[bool] = True

    def poll(self, operation: Any) -> Progress:
        region, copies = operation
        before = region[0].clone()
        progress = super().poll(operation)
        if type(self).fault is not None and any(copy.target == 0 for copy in copies):
            type(self).fault(region[0], before)
        return progress


def flip(arena: torch.Tensor, before: torch.Tensor) -> None:
    arena[5 * BLOCK + 77] ^= 1


def flip_the_last(arena: torch.Tensor, before: torch.Tensor) -> None:
    arena[SIZE - 1] ^= 128


def swap_elements(arena: torch.Tensor, before: torch.Tensor) -> None:
    values = arena.view(torch.float32)
    values[[100, 1300]] = values[[1300, 100]]


def swap_blocks(arena: torch.Tensor, before: torch.Tensor) -> None:
    blocks = arena.view(-1, BLOCK)
    blocks[[2, 7]] = blocks[[7, 2]]


def read_short(arena: torch.Tensor, before: torch.Tensor) -> None:
    arena[3 * BLOCK + 100 :] = before[3 * BLOCK + 100 :]


def keep_a_stale_block(arena: torch.Tensor, before: torch.Tensor) -> None:
    arena[4 * BLOCK : 5 * BLOCK] = before[4 * BLOCK : 5 * BLOCK]


def bring_nothing(arena: torch.Tensor, before: torch.Tensor) -> None:
    arena.copy_(before)


FAULTS = [
    flip,
    flip_the_last,
    swap_elements,
    swap_blocks,
    read_short,
    keep_a_stale_block,
    bring_nothing,
]


@pytest.fixture(params=["in place", "ring"])
def source(request: pytest.FixtureRequest) -> Any:
    if request.param == "ring":
        return Made([(SIZE // 4,)])
    return StateDictSource({"t0": torch.randn(SIZE // 4)})


def change(source: Any) -> torch.Tensor:
    """New values; what they are."""
    if isinstance(source, Made):
        source.seed += 1
        return source.value(0)
    [(_, tensor)] = source
    tensor.add_(1)
    return tensor.clone()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_wrong_bytes_are_seen(fabric, monkeypatch, source, fault):
    trainer = made_trainer(Faulty, source, bucket_nbytes=16 * BLOCK)
    worker = Reader(Faulty, trainer)

    def push(version: int) -> torch.Tensor:
        values = change(source)
        trainer.publish(version, Deadline(30))
        worker.open()
        trainer.send(1, Deadline(30), nothing)
        worker.close()
        return values

    push(1)
    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "fault", fault)
        with pytest.raises(
            CorruptTransfer, match="'t0' did not arrive as the trainer has it"
        ) as error:
            push(2)
    assert error.value.where == "verify"
    assert error.value.expected != error.value.got
    values = push(3)
    assert torch.equal(worker.received["t0"], values)


@pytest.mark.parametrize("verify", ["bytes", "digest", "off"])
def test_bytes_that_did_not_come(fabric, monkeypatch, source, verify):
    class Lazy(MemoryTransport):
        def poll(self, operation: Any) -> Progress:
            return Progress(True, super().poll(operation).nbytes - 1)

    trainer = made_trainer(Lazy, source, bucket_nbytes=16 * BLOCK, verify=verify)
    worker = Reader(Lazy, trainer)
    trainer.publish(1, Deadline(30))
    worker.open()
    trainer.send(1, Deadline(30), nothing)
    if verify == "off":
        worker.close()
        return
    with pytest.raises(CorruptTransfer, match="read less than it was asked to"):
        worker.close()


def test_a_value_that_changes_unseen_by_autograd_is_seen(fabric, transport_cls):
    state = {"a": torch.randn(5000)}
    trainer = made_trainer(transport_cls, StateDictSource(state))
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    trainer.send(1, Deadline(30), nothing)  # has digests of what is there now
    state["a"].data[3000] += 1
    worker.open()
    with pytest.raises(CorruptTransfer, match="'a' did not arrive"):
        worker.close()


def test_another_attempt_is_not_taken_for_this_one(fabric, transport_cls):
    """A reader that comes late finds the signals of the next attempt."""
    trainer = made_trainer(transport_cls, StateDictSource({"a": torch.randn(50)}))
    worker = Reader(transport_cls, trainer)
    trainer.publish(1, Deadline(30))
    trainer._signal(DIGESTED, trainer._ticket + 1)
    worker.open()
    with pytest.raises(Aborted, match="another attempt"):
        worker.close()
