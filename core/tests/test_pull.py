"""A worker reads what its plan needs, as its transport takes it, and no more."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK
from vllm_wt.engine import WorkerContext
from vllm_wt.loading.apply import DirectWrites
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.recorder import record
from vllm_wt.manifest import Manifest
from vllm_wt.pull import PullEngine, PullTrainer
from vllm_wt.ranks import SingleRank
from vllm_wt.round import WorkerRound
from vllm_wt.source import as_source
from vllm_wt.transport import TransportProperties

from .conftest import MemoryTransport

ROWS, COLUMNS = 6, 40


class Columns:
    """A model that takes some columns of one tensor, one whole tensor, and none of the rest."""

    def __init__(self, first: int, count: int) -> None:
        self.columns = slice(first, first + count)
        self.model = torch.nn.Module()
        for name, shape in (("weight", (ROWS, count)), ("bias", (3,))):
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.model.register_parameter(name, parameter)

    def _load(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "wide":
                self.model.weight.data.copy_(tensor[:, self.columns])
            elif name == "bias":
                self.model.bias.data.copy_(tensor)

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        return record(self.model, self._load, manifest)

    def use(self, plan: LoadPlan, batches: Any = None) -> None:
        self.writes = DirectWrites(plan, dict(self.model.named_parameters()))

    def check(self, weights: Any) -> None:
        return None

    def require_awake(self) -> None:
        return None

    def apply(self, weights: Any) -> None:
        self.given = dict(weights)
        self.writes.run(self.given)


def transport_with(**properties: Any) -> type[MemoryTransport]:
    """A transport that notes the copies that it is asked for."""

    class Picky(MemoryTransport):
        copies: ClassVar[list[Any]] = []

        def prepare(self, region: Any, copies: Any) -> Any:
            self.copies.extend(copies)
            assert len(copies) <= self.properties.max_descriptors
            for copy in copies:
                end = copy.source_offset + copy.nbytes
                size = self.fabric.exposed[self._open[copy.owner]][copy.source].numel()
                assert copy.source_offset % self.properties.alignment == 0
                assert copy.target_offset % self.properties.alignment == 0
                assert copy.nbytes % self.properties.alignment == 0 or end == size
            return super().prepare(region, copies)

    Picky.properties = TransportProperties(**properties)
    return Picky


def synced(transport_cls: type[MemoryTransport], loader: Columns, source: Any) -> None:
    """Three rounds, each with other values."""
    context = WorkerContext(backend="memory", device=torch.device("cpu"), rank=0, size=1)
    worker = WorkerRound(PullEngine(context, transport_cls), loader, SingleRank())
    trainer = PullTrainer(
        as_source(source), backend="memory", transport_cls=transport_cls, verify="bytes"
    )
    worker.init(trainer.describe(Deadline(30)).to_wire())
    for version in (1, 2, 3):
        for tensor in source.values():
            tensor.add_(1)
        trainer.publish(version, Deadline(30))
        trainer.send(1, Deadline(30), lambda: None)
        worker.start()
        info = trainer.update_info("all", Deadline(30), known=trainer.generation)
        worker.update(info.to_wire())
        worker.finish()
        assert torch.equal(loader.model.weight, source["wide"][:, loader.columns])
        assert torch.equal(loader.model.bias, source["bias"])
    worker.shutdown()
    trainer.shutdown()


@pytest.fixture
def source() -> dict[str, torch.Tensor]:
    return {
        "unused": torch.zeros(100),
        "empty": torch.zeros(0, 4),
        "wide": torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS),
        "bias": torch.zeros(3),
    }


@pytest.mark.parametrize(
    ("properties", "reads", "nbytes"),
    [
        ({"gaps": {"cpu": 0}}, ROWS, ROWS * 4 * 10),
        ({"gaps": {"cpu": 4 * 30}}, 1, (ROWS - 1) * 4 * COLUMNS + 4 * 10),
        ({"gaps": {"cuda": 0}}, 1, (ROWS - 1) * 4 * COLUMNS + 4 * 10),
        # Rows of 160 bytes; from byte 20 to 60 of each, which is 0 to 64 in steps of 64 and of 32.
        ({"gaps": {"cpu": 0}, "alignment": 32}, ROWS, ROWS * 64),
        ({"gaps": {"cpu": 0}, "max_descriptors": 3}, 1, (ROWS - 1) * 4 * COLUMNS + 4 * 10),
        # Two tensors, in two plans.
        ({"gaps": {"cpu": 0}, "max_descriptors": 1}, 1, (ROWS - 1) * 4 * COLUMNS + 4 * 10),
    ],
    ids=["exact", "gaps", "no gap said", "aligned", "few", "one by one"],
)
def test_reads(fabric, source, properties, reads, nbytes):
    transport_cls = transport_with(**properties)
    synced(transport_cls, Columns(5, 10), source)
    wide = [copy for copy in transport_cls.copies if copy.source == 1]  # what is empty is not there
    assert (len(wide), sum(copy.nbytes for copy in wide)) == (reads, nbytes)
    assert {copy.source for copy in transport_cls.copies} == {1, 2}


def test_the_arena_has_what_is_read_and_no_more(fabric, source):
    loader = Columns(0, 10)
    synced(transport_with(gaps={"cpu": 0}), loader, source)
    assert {name: tuple(tensor.shape) for name, tensor in loader.given.items()} == {
        "empty": (0, 4),
        "wide": (ROWS * 10,),
        "bias": (3,),
    }
    arena = loader.given["wide"].untyped_storage().nbytes()
    assert arena == 2 * BLOCK  # 240 bytes, and 12
