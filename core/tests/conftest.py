"""Stand-ins for what unit tests cannot have: a fabric and a model, both in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead, Revoked
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.manifest import Manifest
from vllm_wt.transport import Copy, Progress, TransportProperties


class MemoryFabric:
    """What endpoints of one test share; ``hold`` keeps reads from completing."""

    def __init__(self) -> None:
        self.exposed: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.notified: dict[str, set[tuple[str, int]]] = {}
        self.endpoints: list[MemoryTransport] = []
        self.hold = False
        self.quiesces = True
        self.fail_submit: Exception | None = None


class MemoryTransport:
    """A Transport whose reads are copies within this process."""

    fabric: MemoryFabric
    properties = TransportProperties()

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.registrations = 0
        self.closed = False
        self._open: dict[str, tuple[str, int]] = {}
        self.fabric.endpoints.append(self)

    def register(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert all(b.dtype == torch.uint8 and b.is_contiguous() and b.numel() for b in buffers)
        self.registrations += 1
        return list(buffers)

    def unregister(self, region: Any) -> None:
        region.clear()

    def expose(self, region: list[torch.Tensor], generation: int) -> bytes:
        self.fabric.exposed[self.name, generation] = region
        return json.dumps([self.name, generation]).encode()

    def revoke(self, generation: int) -> None:
        self.fabric.exposed.pop((self.name, generation), None)

    def progress(self) -> None:
        return None

    def readers(self, ticket: int) -> frozenset[str]:
        notified = list(self.fabric.notified.get(self.name, ()))  # readers add to it meanwhile
        return frozenset(reader for reader, its in notified if its == ticket)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        name, its_generation = json.loads(handle)
        if (name, its_generation) not in self.fabric.exposed:
            raise PeerDead(f"{name} exposes nothing")
        self._open[owner] = (name, its_generation)

    def prepare(self, region: Any, copies: Sequence[Copy]) -> Any:
        return region, list(copies)

    def submit(self, plan: Any) -> Any:
        if self.fabric.fail_submit is not None:
            raise self.fabric.fail_submit
        return plan

    def poll(self, operation: Any) -> Progress:
        if self.fabric.hold:
            return Progress(False, 0)
        region, copies = operation
        done = 0
        for copy in copies:
            source = self.fabric.exposed.get(self._open[copy.owner])
            if source is None:
                raise Revoked("not exposed any more")
            target = region[copy.target]
            target[copy.target_offset : copy.target_offset + copy.nbytes] = source[copy.source][
                copy.source_offset : copy.source_offset + copy.nbytes
            ]
            done += copy.nbytes
        return Progress(True, done)

    def cancel(self, operation: Any) -> bool:
        return self.fabric.quiesces

    def notify(self, owner: str, ticket: int) -> None:
        name, _ = self._open[owner]
        self.fabric.notified.setdefault(name, set()).add((self.name, ticket))

    def close(self) -> None:
        self.closed = True


class MappingFabric(MemoryFabric):
    """One whose readers have the owners' memory; its rules may be changed at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Tensor] = []
        self.exposable: Callable[[torch.Tensor], bool] = lambda tensor: True
        self.mapped: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list
        """From an owner's buffers to what readers get for them."""
        self.check_error: Exception | None = None
        self.must_poll = False
        """Whether owners let readers in by ``progress`` alone."""


class MappingTransport(MemoryTransport):
    """A MappingTransport that maps within this process: readers get the owner's own tensors."""

    fabric: MappingFabric
    properties = TransportProperties(maps=True)

    polls = 0

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> torch.Tensor:
        cls.fabric.allocated.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        return cls.fabric.allocated[-1]

    @classmethod
    def exposable(cls, tensor: torch.Tensor) -> bool:
        assert tensor.is_contiguous()
        assert tensor.numel()
        return cls.fabric.exposable(tensor)

    def open(self, owner: str, generation: int, handle: bytes, deadline: Deadline) -> None:
        super().open(owner, generation, handle, deadline)
        self.check(owner)
        name, _ = self._open[owner]
        (its,) = (endpoint for endpoint in self.fabric.endpoints if endpoint.name == name)
        assert isinstance(its, MappingTransport)
        before = its.polls
        while self.fabric.must_poll and its.polls == before:
            deadline.check(f"{name} lets nobody in", where="open")
            deadline.wait(0.001)

    def progress(self) -> None:
        self.polls += 1

    def listen(self, seconds: float) -> None:
        time.sleep(seconds)

    def map(self, owner: str) -> list[torch.Tensor]:
        return self.fabric.mapped(self.fabric.exposed[self._open[owner]])

    def check(self, owner: str) -> None:
        if self.fabric.check_error is not None:
            raise self.fabric.check_error
        name, _ = self._open[owner]
        if any(endpoint.name == name and endpoint.closed for endpoint in self.fabric.endpoints):
            raise PeerDead(f"{name} has gone")
        if self._open[owner] not in self.fabric.exposed:
            raise Revoked("not exposed any more")


class DictLoader:
    """A model that is a dictionary."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.fail: Exception | None = None
        self.rehearsed: Manifest | None = None

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        self.rehearsed = manifest
        return LoadPlan.of_whole(manifest, "a dictionary")

    def use(self, plan: LoadPlan, batches: Any = None) -> None:
        self.plan = plan

    def check(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        return None

    def require_awake(self) -> None:
        return None

    def look(self) -> None:
        return None

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.fail is not None:
            raise self.fail
        self.weights = {name: tensor.clone() for name, tensor in weights}


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> MemoryFabric:
    fabric = MemoryFabric()
    monkeypatch.setattr(MemoryTransport, "fabric", fabric, raising=False)
    return fabric


@pytest.fixture
def transport_cls(fabric: MemoryFabric) -> type[MemoryTransport]:
    return MemoryTransport


@pytest.fixture
def mapping_fabric(monkeypatch: pytest.MonkeyPatch) -> MappingFabric:
    fabric = MappingFabric()
    monkeypatch.setattr(MappingTransport, "fabric", fabric, raising=False)
    return fabric


@pytest.fixture
def mapping_cls(mapping_fabric: MappingFabric) -> type[MappingTransport]:
    return MappingTransport


@pytest.fixture
def loader() -> DictLoader:
    return DictLoader()
