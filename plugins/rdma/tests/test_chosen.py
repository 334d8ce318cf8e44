"""What UCX has chosen, read from its log and from real reads of a second process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.cli.doctor import child
from vllm_wt.cli.doctor.finding import Finding
from vllm_wt_rdma import chosen, doctor

LONG_S = 120.0
LINE = "[1796098326.153508] [vm:21521:0]   "


def table(into: str, origin: str, *rows: tuple[str, str, str]) -> str:
    """As UCX 1.23 writes it."""
    title = f"remote memory read by ucp_get*(multi) into {into} from {origin}"
    lines = ["x intra-node cfg#1", title, "Range | Description | Config"]
    lines += [" | ".join(row) for row in rows]
    return "".join(f"{LINE}| {line} |\n" for line in lines)


HOST = table("host memory", "host", ("0..inf", "zero-copy", "cma/memory"))
WRITE = f"{LINE}| remote memory write by ucp_put* from host memory to host |\n"
WRITE += f"{LINE}| 0..inf | zero-copy | wrong/write |\n"
EMULATED = ("0..inf", "software emulation", "tcp/lo")
GPU = table(
    "cuda/GPU0", "cuda", ("0", "no data", "wrong/none"), ("1..inf", "zero-copy", "cuda_ipc/cuda")
)


@pytest.mark.parametrize(
    ("log", "status", "found"),
    [
        (HOST + WRITE, "ok", "host memory from host by cma/memory"),
        (
            GPU + HOST + table("host memory", "cuda", EMULATED),
            "ok",
            "cuda memory from cuda by cuda_ipc/cuda; host memory from host by cma/memory; "
            "host memory from cuda by tcp/lo (software emulation)",
        ),
        (
            HOST + table("cuda/GPU0", "cuda", EMULATED),
            "warning",
            "host memory from host by cma/memory; "
            "cuda memory from cuda by tcp/lo (software emulation)",
        ),
        (
            table("host memory", "host", ("0..99", "software emulation", "tcp/lo"))
            + table("host memory", "host", ("0..99", "short", "a/b"), ("100..inf", "x", "c/d")),
            "ok",
            "host memory from host by a/b, c/d",
        ),
        (
            table(
                "host memory",
                "host",
                ("0..9", "software emulation", "a/b"),
                ("10..inf", "x", "c/d"),
            ),
            "ok",
            "host memory from host by a/b (software emulation), c/d",
        ),
    ],
    ids=["host", "gpu", "emulated", "the last of a kind", "short ones only"],
)
def test_what_the_log_says(log: str, status: str, found: str) -> None:
    finding = chosen.judge(chosen.reads_of(log))
    assert (finding.status, finding.found) == (status, f"within this host: {found}")
    assert bool(finding.cure) == (status == "warning")


def test_a_log_that_says_nothing() -> None:
    assert chosen.judge(chosen.reads_of(WRITE)).status == "skipped"


def examine() -> dict[str, Finding]:
    path = "vllm_wt_rdma.doctor:doctor"
    return {f.id: f for f in child.examine("doctor", path, deadline_s=LONG_S)}


@pytest.mark.parametrize(
    ("transports", "status", "found"),
    [
        ("all", "ok", "host memory from host by cma/memory"),
        ("tcp", "warning", "host memory from host by tcp/lo (software emulation)"),
    ],
)
def test_real_reads(
    monkeypatch: pytest.MonkeyPatch, transports: str, status: str, found: str
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    finding = examine()["chosen"]
    assert finding.status == status
    assert found in finding.found


def test_between_kinds_it_reads_from_each_into_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for agents and for a GPU: which reads are made; a failure is only a warning."""
    made: list[tuple[str, str]] = []

    def exchange(endpoint: Any, device: torch.device, kind: str, folder: Path) -> bool:
        made.append((kind, device.type))
        if kind == "cuda":
            raise RuntimeError("no way")
        return True

    monkeypatch.setattr(chosen, "Endpoint", lambda name: name)
    monkeypatch.setattr(doctor, "device_of", torch.device)
    monkeypatch.setattr(doctor, "exchange", exchange)
    failed, last = chosen.findings(["cpu", "cuda"], tmp_path)
    assert made == [("cpu", "cuda"), ("cuda", "cpu")]
    assert (failed.id, failed.status) == ("read-cuda-into-cpu", "warning")
    assert "RuntimeError: no way" in failed.found
    assert last.status == "skipped"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_goes_by_cuda_ipc_and_all_kinds_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    finding = examine()["chosen"]
    kinds = dict(
        part.split(" by ", 1) for part in finding.found.partition("this host: ")[2].split("; ")
    )
    assert "cuda_ipc" in kinds["cuda memory from cuda"]
    assert "emulation" not in kinds["cuda memory from cuda"]
    assert {"host memory from cuda", "cuda memory from host", "host memory from host"} <= set(kinds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_emulation_of_gpu_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")
    finding = examine()["chosen"]
    assert finding.status == "warning"
    assert "cuda memory from cuda by tcp" in finding.found
    assert "read-cuda" in finding.cure
