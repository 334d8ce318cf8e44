"""The package's own checks: real agents, in the process that ``vllm-wt doctor`` would make."""

from __future__ import annotations

import importlib.util
import mmap
import resource
from pathlib import Path

import pytest

from vllm_wt.cli.doctor import child
from vllm_wt.cli.doctor.finding import Finding
from vllm_wt_rdma import doctor, plugin

LONG_S = 120.0


def examine() -> dict[str, Finding]:
    path = "vllm_wt_rdma.doctor:doctor"
    return {f.id: f for f in child.examine("doctor", path, deadline_s=LONG_S)}


def test_the_spec_leads_here() -> None:
    path = plugin.vllm_wt_backend().doctor
    assert path is not None
    module, name = path.split(":")
    assert getattr(importlib.import_module(module), name) is doctor.doctor


def test_a_good_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    found = examine()
    assert {f.id: f.found for f in found.values() if f.status == "problem"} == {}
    assert found["nixl"].found.startswith("nixl-cu1")
    assert found["agent-cpu"].found.startswith("NIXL with UCX 1.")
    assert found["read-cpu"].found.startswith("4 KiB read from another process, by ")
    assert "unknown path" not in found["read-cpu"].found
    assert found["ucx-tls"].status == "ok"
    assert found["ucx-copies"].found.startswith("one: ")
    assert "libucs" in found["ucx-copies"].found
    if importlib.util.find_spec("ucxx") is not None:
        assert found["ucx"].found.startswith("ucxx-cu1")
        assert found["ucx-read-cpu"].found.startswith("1 MiB read from another process, by ")
        assert "unknown path" not in found["ucx-read-cpu"].found


def test_without_copies_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    found = examine()
    assert found["ucx-tls"].status == found["net-devices"].status == "warning"
    assert "cma, the fast path" in found["ucx-tls"].found
    assert found["read-cpu"].status == "warning"
    assert "by tcp/lo: not by copies between processes" in found["read-cpu"].found
    assert found["read-cpu"].cure == "unset UCX_TLS; see ptrace"


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("UCX_TLS", "UCX: transport 'garbage' is not available, please use one or more of"),
        ("UCX_NET_DEVICES", "UCX: network device 'garbage' is not available"),
    ],
)
def test_no_agent(monkeypatch: pytest.MonkeyPatch, variable: str, words: str) -> None:
    monkeypatch.setenv(variable, "garbage")
    found = examine()
    agent = found["agent-cpu"]
    assert agent.status == "problem"
    assert words in agent.found
    assert agent.found.startswith("NIXL's UCX backend refused; nixlBackendError")
    assert agent.cure.startswith(f"unset or correct {variable}")
    assert "read-cpu" not in found


def test_no_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libucp.so.0: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = examine()["nixl"]
    assert found.status == "problem"
    assert "nixl_cu13: libucp.so.0: not found" in found.found
    assert found.cure.startswith("pip install nixl-cu13")


def test_an_agent_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a NIXL whose UCX ends the process."""
    crash = "import os\ndef nixl_agent_config(**_): os.abort()\n"
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / f"{name}.py").write_text(crash + "nixl_agent = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = examine()
    assert "by SIGABRT; the last thing it found: nixl" in found["doctor"].found


def test_a_peer_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OWNER", "raise SystemExit(7)")
    agent, read = doctor._read("cpu", tmp_path)
    assert agent.status == "ok"
    assert (read.id, read.status) == ("read-cpu", "problem")
    assert "the peer's process ended with 7" in read.found


def test_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = doctor._content()
    monkeypatch.setattr(doctor, "_content", lambda: content + 1)
    _, read = doctor._read("cpu", tmp_path)
    assert (read.status, read.found) == ("problem", "a read of 4 KiB brought other bytes")


@pytest.mark.parametrize(
    ("value", "cuda", "status", "lacks"),
    [
        ("all", True, "ok", []),
        ("tcp,cma", False, "ok", []),
        ("^ib", True, "ok", []),
        ("rc,sm,cuda_ipc,cuda_copy", True, "ok", []),
        ("tcp", False, "warning", ["cma"]),
        ("sm", False, "warning", ["tcp (or rc, dc, ud)"]),
        ("tcp,sm", True, "warning", ["cuda_ipc", "cuda_copy"]),
        ("^cuda_ipc", True, "warning", ["cuda_ipc"]),
        ("^cma", False, "warning", ["cma"]),
    ],
)
def test_ucx_tls(
    monkeypatch: pytest.MonkeyPatch, value: str, cuda: bool, status: str, lacks: list[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", value)
    found = doctor.transports(cuda)
    assert found.status == status
    assert found.cure == ("" if status == "ok" else "unset UCX_TLS, or add it")
    for part in lacks:
        assert part in found.found


@pytest.mark.parametrize(
    ("value", "status", "part"),
    [
        (None, "ok", "network: eth0, lo; InfiniBand or RoCE: mlx5_0"),
        ("all", "ok", "network"),
        ("^eth0", "ok", "network"),
        ("mlx5_0:1,eth0", "ok", "UCX_NET_DEVICES=mlx5_0:1,eth0"),
        ("lo", "warning", "for peers on this host only"),
        ("eth0,eth7", "warning", "no such device: eth7"),
        ("mlx5_9:1", "problem", "no such device: mlx5_9"),
    ],
)
def test_net_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, status: str, part: str
) -> None:
    """A folder with the devices of another host."""
    for name in ("net/eth0", "net/lo", "infiniband/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", value)
    found = doctor.net_devices(tmp_path)
    assert found.status == status
    assert part in found.found
    assert status == "ok" or "UCX_NET_DEVICES" in found.cure


@pytest.mark.parametrize(("card", "status"), [(True, "problem"), (False, "ok")])
def test_locked_memory(tmp_path: Path, card: bool, status: str) -> None:
    if card:
        (tmp_path / "mlx5_0").mkdir()
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        found = doctor.locked_memory(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert found.status == status
    assert found.found.startswith("locked-memory limit: 64 KiB")
    assert found.cure.startswith("ulimit -l unlimited" if card else "")


def test_two_copies_of_ucx(tmp_path: Path) -> None:
    maps = []
    for name in ("libucs.so.0.0.0", "libucs-14c218c5.so.0.0.0"):
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        found = doctor.ucx_copies(Path("/proc/self/maps"))
        assert str(path) in found.found
    assert found.status == "warning"
    assert "LD_LIBRARY_PATH" in found.cure
    for each in maps:
        each.close()


# As logged on a host with GPUs.
TABLE = """\
[1.0] [h:1 :0]   | doctor-cuda intra-node cfg#1 |
[1.0] [h:1 :0]   | remote memory read by ucp_get*(multi) into {into} from {into} |
[1.0] [h:1 :0]   +--------+-------------+------------------+
[1.0] [h:1 :0]   | Range  | Description |      Config      |
[1.0] [h:1 :0]   +--------+-------------+------------------+
[1.0] [h:1 :0]   | 0      | no data     | {path} |
[1.0] [h:1 :0]   | 1..inf | zero-copy   | {path} |
[1.0] [h:1 :0]   +--------+-------------+------------------+
"""


@pytest.mark.parametrize(
    ("kind", "into", "path", "status"),
    [
        ("cuda", "cuda/dev[1]", "cuda_ipc/cuda", "ok"),
        ("cuda", "cuda/GPU0", "cuda_ipc/cuda", "ok"),
        ("cuda", "cuda/dev[1]", "tcp/lo", "warning"),
        ("cpu", "host memory", "cma/memory", "ok"),
        ("cpu", "host memory", "tcp/lo", "warning"),
    ],
)
def test_the_path_of_a_read(kind: str, into: str, path: str, status: str) -> None:
    other = TABLE.format(into="host memory" if kind == "cuda" else "cuda/GPU0", path="wrong/way")
    early = TABLE.format(into=into, path="wrong/early")  # of another connection, before
    found = doctor.judge_path(kind, early + TABLE.format(into=into, path=path) + other)
    assert found.status == status
    assert f"by {path}" in found.found
    assert "wrong" not in found.found
    assert bool(found.cure) == (status != "ok")
    assert ("0.4 GB/s" in found.found) == ((kind, status) == ("cuda", "warning"))


def test_a_log_that_tells_nothing() -> None:
    assert "an unknown path" in doctor.judge_path("cuda", "").found


@pytest.mark.gpu
def test_gpu_memory_goes_by_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.delenv("UCX_TLS", raising=False)
    found = examine()["read-cuda"]
    assert found.status == "ok"
    assert "cuda_ipc" in found.found
