"""The package's own checks, in the process that ``vllm-wt doctor`` would make."""

from __future__ import annotations

import importlib

import pytest
import torch

from vllm_wt.cli.doctor import child
from vllm_wt_ipc import doctor, plugin, room

LONG_S = 120.0


def test_the_spec_leads_here() -> None:
    path = plugin.vllm_wt_backend().doctor
    assert path is not None
    module, name = path.split(":")
    assert getattr(importlib.import_module(module), name) is doctor.doctor


def test_a_good_host() -> None:
    path = "vllm_wt_ipc.doctor:doctor"
    found = {f.id: f for f in child.examine("doctor", path, deadline_s=LONG_S)}
    assert {f.id: f.found for f in found.values() if f.status == "problem"} == {}
    assert found["read-cpu"].found == "4 KiB mapped from another process"
    assert "MiB of shared memory" in found["shared-memory"].found
    assert "read-cuda" in found


def test_a_peer_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OWNER", "raise SystemExit(7)")
    found = doctor.read("cpu")
    assert found.status == "problem"
    assert "the peer's process ended with 7" in found.found


def test_a_peer_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OWNER", "print('{}')")
    found = doctor.read("cpu")
    assert found.status == "problem"
    assert "IpcHandle lacks the field" in found.found


def test_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = doctor._content()
    monkeypatch.setattr(doctor, "_content", lambda: content + 1)
    found = doctor.read("cpu")
    assert (found.status, found.found) == ("problem", "a read of 4 KiB brought other bytes")


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available", lambda: 64 << 20)
    found = doctor.shared_memory()
    assert (found.status, found.found) == ("warning", "64 MiB of shared memory can be had")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "ok"),
        ("max_split_size_mb:128", "ok"),
        ("expandable_segments:False", "ok"),
        ("max_split_size_mb:128,expandable_segments:True", "warning"),
        ("expandable_segments: true", "warning"),
        ("backend:cudaMallocAsync", "warning"),
    ],
)
def test_the_allocators_settings(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None, status: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    found = doctor.allocator()
    assert found.status == status
    assert (status == "ok") == (not found.cure)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_mapped() -> None:
    path = "vllm_wt_ipc.doctor:doctor"
    found = {f.id: f for f in child.examine("doctor", path, deadline_s=LONG_S)}
    assert found["read-cuda"].found == "4 KiB mapped from another process"
    assert found["gpus"].status == "ok"
