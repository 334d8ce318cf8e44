"""What ``vllm-wt doctor`` says of UCX without NIXL; tests/test_doctor.py has the whole of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_wt_rdma.ucx import bindings, doctor

TABLE = """
[1] [h:1 :0]   +-----+-----+
[1] [h:1 :0]   | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from {memory} memory |
[1] [h:1 :0]   +-----+-----+-----+
[1] [h:1 :0]   |     0..92 | eager short                 | {short} |
[1] [h:1 :0]   |   8K..inf | rendezvous zero-copy read   | {long} |
[1] [h:1 :0]   +-----+-----+-----+
"""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it changes in the environment is undone."""
    monkeypatch.setenv("UCX_LOG_FILE", os.devnull)


def test_without_ucxx_it_is_skipped_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = doctor.findings(["cpu"], tmp_path)
    assert (found.id, found.status) == ("ucx", "skipped")
    assert "pip install 'vllm-wt-rdma[ucx]'" in found.found


def test_a_ucxx_that_cannot_be_imported_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise OSError("libucp.so: no such file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(bindings.importlib, "import_module", broken)
    bindings.load.cache_clear()
    (found,) = doctor.findings(["cpu"], tmp_path)
    assert (found.id, found.status, found.cure) == ("ucx", "problem", bindings.CURE)
    assert "libucp.so: no such file" in found.found


@pytest.mark.usefixtures("ucxx")
def test_a_peer_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OWNER", "raise SystemExit(7)")
    found = list(doctor.findings(["cpu"], tmp_path))[-1]
    assert (found.id, found.status) == ("ucx-read-cpu", "problem")
    assert "the peer's process ended with 7" in found.found


@pytest.mark.usefixtures("ucxx")
def test_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = doctor._content()
    monkeypatch.setattr(doctor, "_content", lambda: content + 1)
    found = list(doctor.findings(["cpu"], tmp_path))[-1]
    assert (found.status, found.found) == ("problem", "a read of 1 MiB brought other bytes")


@pytest.mark.usefixtures("ucxx")
def test_memory_that_peers_share_is_left_out_even_where_ucx_is_told_to_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    for name in ("POSIX", "SYSV"):
        monkeypatch.setenv(f"UCX_{name}_ERROR_HANDLING", "y")
    found = list(doctor.findings(["cpu"], tmp_path))[-1]
    assert (found.id, found.status) == ("ucx-read-cpu", "ok")
    assert found.found == "1 MiB read from another process, by tcp/lo"


@pytest.mark.parametrize(
    ("kind", "memory", "path", "status"),
    [
        ("cpu", "host", "cma/memory", "ok"),
        ("cpu", "host", "tcp/lo", "ok"),
        ("cpu", "host", "sysv/memory", "warning"),
        ("cpu", "host", "posix/memory", "warning"),
        ("cuda", "cuda", "cuda_ipc/cuda", "ok"),
        ("cuda", "cuda", "tcp/lo", "warning"),
    ],
)
def test_the_path_is_judged(kind: str, memory: str, path: str, status: str) -> None:
    log = TABLE.format(memory="rdma", short="rc_mlx5/0", long="rc_mlx5/0")  # of another memory
    log += TABLE.format(memory=memory, short=path, long=path)
    found = doctor.judge_path(kind, log)
    assert (found.id, found.status) == (f"ucx-read-{kind}", status)
    assert f"by {path}" in found.found
    assert bool(found.cure) is (status == "warning")
