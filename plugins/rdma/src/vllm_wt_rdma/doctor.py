"""What would keep NIXL and UCX from moving bytes here, for ``vllm-wt doctor``.

Runs in a process of its own. It reads four KiB from a second process, as a worker does from a
trainer, and tells from UCX's log by which transports: UCX falls back to slow ones without a word.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_wt.cli.doctor.finding import Finding
from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt_rdma import nixl
from vllm_wt_rdma.endpoint import Endpoint

_BYTES = 4096
_READ_S = 60.0
_LOCKED_NEEDED = 1 << 30
_NETWORK_TLS = {"all", "tcp", "ib", "rc", "rc_v", "rc_x", "rc_mlx5", "ud", "ud_v", "ud_x"} | {
    "ud_mlx5", "dc", "dc_x", "dc_mlx5", "gga", "srd",
}  # fmt: skip
_CUDA_TLS = {"all", "cuda", "cuda_ipc"}
_CMA_TLS = {"all", "cma", "sm", "shm"}
MEMORY = {"cpu": "host", "cuda": "cuda"}
"""What UCX calls a kind of memory."""
_LOCALHOST = "for peers on this host only"
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Environment variables that most often break NIXL."""
_MAX_WORDS = 4
_OWNER = "from vllm_wt_rdma.doctor import serve; serve()"
_SYS_CLASS = Path("/sys/class")


def doctor() -> Iterator[Finding]:
    """All checks; changes this process's environment."""
    with tempfile.TemporaryDirectory(prefix="vllm-wt-rdma-") as folder:
        # Before NIXL is loaded: UCX writes to stdout otherwise. %p keeps the two processes apart.
        os.environ["UCX_LOG_FILE"] = f"{folder}/ucx-%p.log"
        os.environ["UCX_LOG_LEVEL"] = "info"
        os.environ["UCX_PROTO_INFO"] = "y"
        yield net_devices(_SYS_CLASS)
        yield transports(torch.cuda.is_available())
        yield locked_memory(_SYS_CLASS / "infiniband")
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        yield from _nixl(kinds, Path(folder))
        from vllm_wt_rdma.ucx.doctor import findings  # it takes from here

        yield from findings(kinds, Path(folder))


def _nixl(kinds: list[str], folder: Path) -> Iterator[Finding]:
    try:
        yield Finding("nixl", "ok", nixl.load().version)
    except WeightTransferError as error:
        got, cure = f"{error.what}: {error.got}", error.cure or "pip install nixl-cu13"
        yield Finding("nixl", "problem", got, cure)
        return
    for kind in kinds:
        yield from _read(kind, folder)
    if len(kinds) == 1:
        yield Finding("read-cuda", "skipped", "torch sees no GPU")
    from vllm_wt_rdma.chosen import findings

    yield from findings(kinds, folder)
    yield ucx_copies(Path("/proc/self/maps"))  # before UCXX brings its own, of other names


def net_devices(sys_class: Path) -> Finding:
    """Network devices, and whether ``UCX_NET_DEVICES`` names some that exist."""
    there = {
        kind: sorted(path.name for path in (sys_class / kind).glob("*"))
        for kind in ("net", "infiniband")
    }
    found = f"network: {_names(there['net'])}; InfiniBand or RoCE: {_names(there['infiniband'])}"
    value = os.environ.get("UCX_NET_DEVICES", "all")
    if value == "all" or value.startswith("^"):
        return Finding("net-devices", "ok", found)
    wanted = [name.split(":")[0].strip() for name in value.split(",")]
    missing = [name for name in wanted if name not in there["net"] + there["infiniband"]]
    found = f"UCX_NET_DEVICES={value}; {found}"
    cure = "name a device that is there in UCX_NET_DEVICES, or unset it"
    if missing:
        status = "problem" if missing == wanted else "warning"
        return Finding("net-devices", status, f"{found}; no such device: {_names(missing)}", cure)
    if wanted == ["lo"]:
        return Finding("net-devices", "warning", f"{found}; that is {_LOCALHOST}", cure)
    return Finding("net-devices", "ok", found)


def transports(cuda: bool) -> Finding:
    """What ``UCX_TLS`` leaves out; whether UCX can work with it at all, the agent shows."""
    value = os.environ.get("UCX_TLS", "all")
    negated = value.startswith("^")
    named = {name.strip().split(":")[0] for name in value.lstrip("^").split(",")}

    def off(group: set[str]) -> bool:
        return bool(group & named) if negated else not group & named

    lacks = []
    if not negated and off(_NETWORK_TLS):
        lacks.append("tcp (or rc, dc, ud), which every connection needs")
    if off(_CMA_TLS):
        lacks.append("cma, the fast path for host memory within a host")
    if cuda and off(_CUDA_TLS):
        lacks.append("cuda_ipc, the fast path for GPU memory within a host")
    if cuda and off({"all", "cuda", "cuda_copy"}):
        lacks.append("cuda_copy, without which NIXL refuses to start on a GPU host")
    if not lacks:
        return Finding("ucx-tls", "ok", f"UCX_TLS is {value}")
    return Finding(
        "ucx-tls",
        "warning",
        f"UCX_TLS={value} lacks {'; '.join(lacks)}",
        "unset UCX_TLS, or add it",
    )


def locked_memory(infiniband: Path) -> Finding:
    """InfiniBand and RoCE lock what is registered."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    found = f"locked-memory limit: {text}"
    if not any(infiniband.glob("*")):
        return Finding("locked-memory", "ok", f"{found}; no InfiniBand or RoCE here needs it")
    # Root has CAP_IPC_LOCK as a rule, but not in a container: the limit is what is sure.
    if limit != resource.RLIM_INFINITY and limit < _LOCKED_NEEDED:
        return Finding(
            "locked-memory",
            "problem",
            f"{found}; registering weights with InfiniBand or RoCE would fail",
            "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)",
        )
    return Finding("locked-memory", "ok", found)


def ucx_copies(maps: Path) -> Finding:
    """Two copies of UCX in a process share symbols and crash or hang."""
    copies: dict[str, set[str]] = {}
    for line in maps.read_text().splitlines():
        if match := re.search(r"/\S*/(libuc[pst])\b\S*\.so\S*", line):
            copies.setdefault(match[1], set()).add(os.path.realpath(match[0]))
    found = "; ".join(" and ".join(sorted(paths)) for _, paths in sorted(copies.items()))
    if any(len(paths) > 1 for paths in copies.values()):
        return Finding(
            "ucx-copies",
            "warning",
            f"more than one UCX in a process: {found}",
            "take the others out of LD_LIBRARY_PATH and LD_PRELOAD",
        )
    return Finding("ucx-copies", "ok", f"one: {found}" if copies else "none is loaded")


def _read(kind: str, folder: Path) -> Iterator[Finding]:
    """An agent, and a read of another process's memory of one kind."""
    log = folder / f"ucx-{os.getpid()}.log"
    seen = len(text_of(log))
    check = f"read-{kind}"
    try:
        device = device_of(kind)
        endpoint = Endpoint(f"doctor-{kind}")
    except Exception as error:
        yield problem(f"agent-{kind}", error, text_of(log)[seen:])
        return
    version = re.search(r"UCX  INFO  Version (\S+)", text_of(log))
    yield Finding(f"agent-{kind}", "ok", f"NIXL with UCX {version[1] if version else '?'}")
    try:
        same = exchange(endpoint, device, kind, folder)
    except Exception as error:
        yield problem(check, error, text_of(log)[seen:])
        return
    if same:
        yield judge_path(kind, text_of(log)[seen:])
    else:
        cure = "reinstall NIXL; check the devices' memory"
        yield Finding(check, "problem", "a read of 4 KiB brought other bytes", cure)


def exchange(endpoint: Endpoint, device: torch.device, kind: str, folder: Path) -> bool:
    """Read another process's memory of one kind to a device, and end the endpoint; whether the right
    bytes came."""
    path = folder / f"handle-{kind}-{device.type}"
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(path), kind], stdin=subprocess.PIPE)
    try:
        deadline = Deadline(_READ_S)
        while not path.exists():
            if owner.poll() is not None:
                raise RuntimeError(f"the peer's process ended with {owner.returncode}")
            deadline.check("The peer's process has not started")
            time.sleep(0.01)
        return _transfer(endpoint, device, json.loads(path.read_text()), deadline)
    finally:
        endpoint.destroy()
        owner.kill()
        owner.communicate()


def judge_path(kind: str, log: str) -> Finding:
    """From UCX's tables of protocols: what reads of this kind of memory go by."""
    paths = reads_by(log, kind)
    found = f"4 KiB read from another process, by {_names(paths) if paths else 'an unknown path'}"
    check, text = f"read-{kind}", " ".join(paths)
    if kind == "cuda" and "cuda_ipc" not in text:
        return Finding(
            check,
            "warning",
            f"{found}: not by CUDA IPC, so reads on one host may fall to TCP at 0.4 GB/s",
            "unset UCX_TLS; let both sides use the GPU before the transport is made; "
            "see expandable-segments; give both containers --ipc=host and --pid=host",
        )
    if kind == "cpu" and "cma" not in text and "sysv" not in text and "posix" not in text:
        return Finding(
            check,
            "warning",
            f"{found}: not by copies between processes, which are about ten times as fast",
            "unset UCX_TLS; see ptrace",
        )
    return Finding(check, "ok", found)


def reads_by(log: str, kind: str) -> list[str]:
    """Configurations of the last table of reads into a kind of memory."""
    return tables(log, "memory read by ucp_get", f"into {MEMORY[kind]}")


def tables(log: str, *title: str) -> list[str]:
    """Configurations of the last table whose title has these words, in UCX_PROTO_INFO's form."""
    paths: list[str] = []
    wanted = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")[:-1]]
        if 1 <= len(cells) <= 2 and "by ucp_" in cells[-1]:  # in some releases behind a name
            wanted = all(words in cells[-1] for words in title)
            paths = [] if wanted else paths
        elif wanted and len(cells) == 3 and cells[0] != "Range" and cells[2] not in paths:
            paths.append(cells[2])
    return paths


def _transfer(
    endpoint: Endpoint, device: torch.device, handle: dict[str, str], deadline: Deadline
) -> bool:
    target = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    kind, row = _row(target)
    endpoint.register(kind, [row], [target])
    endpoint.add_peer(handle["name"], base64.b64decode(handle["metadata"]), handle["version"])
    address, index = (int(part) for part in handle["row"].split())
    read = endpoint.make_read(handle["name"], (kind, [row]), (kind, [(address, _BYTES, index)]))
    done = endpoint.post(read)
    while not done:
        deadline.check("The read has not completed")
        time.sleep(0.001)
        done = endpoint.check(read)
    return torch.equal(target.cpu(), _content())


def serve() -> None:
    """The peer: writes its handle to a file and serves reads until its stdin ends."""
    path, kind = Path(sys.argv[1]), sys.argv[2]
    memory = _content().to(device_of(kind))
    name = f"doctor-owner-{kind}"
    endpoint = Endpoint(name)
    memory_kind, row = _row(memory)
    endpoint.register(memory_kind, [row], [memory])
    handle = {
        "name": name,
        "metadata": base64.b64encode(endpoint.metadata()).decode(),
        "version": endpoint.version,
        "row": f"{row[0]} {row[2]}",
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(handle))
    part.rename(path)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        endpoint.receive()
    endpoint.destroy()


def device_of(kind: str) -> torch.device:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        nixl.use_cuda(device)
    return device


def _content() -> torch.Tensor:
    return (torch.arange(_BYTES) * 37 % 251).to(torch.uint8)


def _row(buffer: torch.Tensor) -> tuple[str, tuple[int, int, int]]:
    kind = "VRAM" if buffer.is_cuda else "DRAM"
    return kind, (buffer.data_ptr(), buffer.numel(), max(buffer.get_device(), 0))


def problem(check: str, error: Exception, log: str, *, library: str = "NIXL") -> Finding:
    """What failed, in UCX's own words where it has some."""
    if isinstance(error, WeightTransferError):
        parts = [error.what] + ([error.got] if error.got else [])
    else:
        parts = [f"{type(error).__name__}: {error}"]
    words = re.findall(r"UCX  (?:WARN|ERROR)\s+(.*)", log)[:_MAX_WORDS]
    given = [name for name in _SETTINGS if name in os.environ]
    cure = getattr(error, "cure", None)
    if given:
        cure = f"unset or correct {', '.join(given)}"
    elif words or not cure:
        cure = f"do what UCX says; reinstall {library}"
    return Finding(check, "problem", "; UCX: ".join(["; ".join(parts), *words]), cure)


def text_of(path: Path) -> str:
    """UCX's log so far; UCX leaves most of it in a buffer of the C library."""
    ctypes.CDLL(None).fflush(None)
    return path.read_text(errors="replace") if path.exists() else ""


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"
