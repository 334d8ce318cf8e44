"""The entry point, the options, and a trainer that nobody has come to."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_wt.clients import hosts_of
from vllm_wt.clients.http import HttpClient
from vllm_wt.deadline import Deadline
from vllm_wt.engine import WorkerContext
from vllm_wt.errors import Aborted, InvalidInfo, ManifestMismatch, Timeout, WrongOrder
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.source import StateDictSource
from vllm_wt.spec import Capability, Kind
from vllm_wt_nccl import plugin
from vllm_wt_nccl import trainer as trainer_module
from vllm_wt_nccl.bucketing import default_nbytes
from vllm_wt_nccl.info import NcclInitInfo
from vllm_wt_nccl.trainer import NcclTrainer
from vllm_wt_nccl.worker import NcclEngine


def _trainer(**options: Any) -> NcclTrainer:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0)}
    return NcclTrainer(StateDictSource(weights), backend="nccl", **options)


def _described(trainer: NcclTrainer) -> NcclInitInfo:
    info = trainer.describe(Deadline(30))
    assert isinstance(info, NcclInitInfo)
    return info


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, vllm_wt_nccl.plugin\n"
        "vllm_wt_nccl.plugin.vllm_wt_backend()\n"
        "heavy = {'torch', 'numpy', 'nccl', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("nbytes", "device", "senders", "expected"),
    [
        (1 << 30, "cpu", 1, 4 << 20),
        (1000, "cuda", 1, 8 << 20),
        (1 << 30, "cuda", 1, 128 << 20),
        (1 << 30, "cuda", 3, 44_740_608),  # a 24th, in whole blocks
        (1 << 40, "cuda", 1, 256 << 20),
        (1 << 40, "cuda", 8, 32 << 20),
    ],
)
def test_size_of_a_bucket(nbytes: int, device: str, senders: int, expected: int) -> None:
    manifest = Manifest((TensorMeta("w", "uint8", (nbytes,)),))
    assert default_nbytes(manifest, torch.device(device), senders) == expected


def test_a_trainer_with_another_kind_of_memory_is_refused() -> None:
    info = _described(_trainer())
    engine = NcclEngine(WorkerContext(backend="nccl", device=torch.device("cpu"), rank=0, size=1))
    plan = LoadPlan.of_whole(info.manifest(), "no model")
    engine.plan_receive(plan, info)
    with pytest.raises(InvalidInfo, match="another kind of memory") as caught:
        engine.plan_receive(plan, replace(info, device="cuda"))
    assert (caught.value.expected, caught.value.got) == ("cpu", "cuda")


def test_the_spec_leads_to_the_engines() -> None:
    spec = plugin.vllm_wt_backend()
    assert (spec.name, spec.kind) == ("nccl", Kind.ENGINE)
    expected = {Capability.CPU, Capability.CUDA, Capability.MULTI_HOST, Capability.MANY_READERS}
    assert expected == spec.capabilities
    for path in (spec.worker, spec.trainer, spec.baseline):
        assert path is not None
        module, name = path.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", ""),
        ("address", 7),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", "80"),
        ("verify", "some"),
        ("staging", "disk"),
        ("bucket_nbytes", 4095),
        ("bucket_nbytes", 0),
        ("no_such_option", 1),
    ],
)
def test_an_option_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInfo, match=name):
        _trainer(**{name: value})


def test_it_is_met_on_the_way_to_the_engines() -> None:
    assert _described(_trainer()).address == "127.0.0.1"
    trainer = _trainer(address="::1")
    assert _described(trainer).address == "::1"
    trainer = _trainer()
    trainer.hosts = ("127.0.0.5",)
    assert _described(trainer).address == "127.0.0.1"


def test_engines_of_this_host_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"here": "127.0.0.1", "far": "192.0.2.9", "six": "2001:db8::1"}
    monkeypatch.setattr(trainer_module, "local_address", ways.__getitem__)
    trainer = _trainer()
    for hosts, way in (
        ((), "127.0.0.1"),
        (("here",), "127.0.0.1"),
        (("here", "far"), "192.0.2.9"),
        (("six", "here"), "2001:db8::1"),
    ):
        trainer.hosts = hosts
        assert trainer._way_to_engines() == way


def test_hosts_of_clients() -> None:
    class Local:
        """An engine of this host."""

    clients = [HttpClient("http://127.0.0.1:8000"), Local(), HttpClient("http://[::1]:8000/x")]
    assert hosts_of([*clients, clients[0]]) == ("127.0.0.1", "::1")


def test_a_port_of_ones_own() -> None:
    first = _trainer()
    port = _described(first).port
    with pytest.raises(InvalidInfo, match=str(port)):
        _trainer(port=port).describe(Deadline(30))


def test_an_engine_that_does_not_count_its_workers_is_refused() -> None:
    trainer = _trainer()
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    with pytest.raises(InvalidInfo, match="world_size"):
        trainer.send(None, Deadline(30), lambda: None)


def test_workers_that_do_not_come() -> None:
    trainer = _trainer()
    trainer.describe(Deadline(30))
    trainer.publish(1, Deadline(30))
    with pytest.raises(Timeout, match="0 of 2 workers"):
        trainer.send(2, Deadline(0.2), lambda: None)
    trainer.withdraw()
    trainer.settle()
    deadline = Deadline(60)
    trainer.publish(2, deadline)
    with pytest.raises(Aborted):
        trainer.send(2, deadline, lambda: deadline.cancel("no longer wanted"))


def test_a_trainer_that_was_shut_down() -> None:
    trainer = _trainer()
    trainer.describe(Deadline(30))
    trainer.shutdown()
    trainer.shutdown()
    trainer.publish(1, Deadline(30))
    with pytest.raises(WrongOrder, match="connect again"):
        trainer.send(1, Deadline(30), lambda: None)


def test_weights_that_changed_are_refused() -> None:
    weights = {"a": torch.zeros(2)}
    trainer = NcclTrainer(StateDictSource(weights), backend="nccl")
    weights["a"] = torch.zeros(3)
    with pytest.raises(ManifestMismatch):
        trainer.publish(1, Deadline(30))
