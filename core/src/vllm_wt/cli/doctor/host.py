"""The host: memory, rights between processes, CUDA, sockets, limits."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_wt.cli.doctor.finding import Finding

_SHM_NEEDED = 64_000_000
_DOCKER_SHM = 64 << 20
_FILES = 1024
_PTRACE_CURE = (
    "in a container: docker run --cap-add SYS_PTRACE, or --ipc=host with a seccomp profile that "
    "allows it; else: sysctl kernel.yama.ptrace_scope=0"
)
_CUDA_CURE = (
    "see nvidia-smi; install a driver for that CUDA or a torch for the driver and the GPU; "
    "check CUDA_VISIBLE_DEVICES"
)
_PIDFD_GETFD = 438
_CONNECT_S = 3.0
_VICTIM = """
import ctypes, sys
memory = ctypes.create_string_buffer(b"vllm-wt", 8)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""
"""A process with eight bytes to be read; it ends with its stdin."""


def shm() -> Iterator[Finding]:
    """``/dev/shm``, which vLLM's workers and UCX use."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("shm", "problem", f"/dev/shm: {error.strerror}", "mount a tmpfs on /dev/shm")
        return
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"/dev/shm has {free / 1e6:.0f} MB free of {total / 1e6:.0f} MB"
    cure = "docker run --shm-size=8g (or --ipc=host), or remove old files in /dev/shm"
    if free < _SHM_NEEDED:
        yield Finding("shm", "problem", found, cure)
    elif total <= _DOCKER_SHM:
        yield Finding("shm", "warning", f"{found}, docker's default", cure)
    else:
        yield Finding("shm", "ok", found)


def file_descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        yield Finding(
            "file-descriptors",
            "warning",
            f"at most {text} open files a process",
            f"ulimit -n {_FILES * 64 if hard < 0 else hard}",
        )
    else:
        yield Finding("file-descriptors", "ok", f"ulimit -n is {text}")


def ptrace() -> Iterator[Finding]:
    """May processes of one user read each other? UCX's copies within a host (CMA) need it."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    level = scope.read_text().strip() if scope.exists() else "absent"
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        address = int(victim.stdout.readline())
        failed = _read_of(libc, victim.pid, address)
        getfd = _getfd_of(libc, victim.pid)
    yield judge_ptrace(level, failed)
    yield judge_segments(getfd)


def judge_ptrace(level: str, failed: str | None) -> Finding:
    """A child may be read at level 1 too, and UCX asks for it there; above, root only."""
    found = f"ptrace_scope is {level}; process_vm_readv of another process "
    slow = ", so within a host UCX copies by TCP"
    if failed is not None:
        return Finding("ptrace", "warning", f"{found}fails: {failed}{slow}", _PTRACE_CURE)
    if level not in {"absent", "0", "1"} and os.geteuid() != 0:
        return Finding("ptrace", "warning", f"{found}is for root only{slow}", _PTRACE_CURE)
    return Finding("ptrace", "ok", f"{found}works")


def judge_segments(getfd: str | None) -> Finding:
    """PyTorch's expandable segments, whose memory CUDA IPC can't share as it does other memory."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(variable, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            rights = "is permitted" if getfd is None else f"fails: {getfd}"
            return Finding(
                "expandable-segments",
                "warning",
                f"{variable}={value}: CUDA IPC can't share such memory as it is; sharing it takes "
                f"pidfd_getfd, which {rights}",
                f"unset expandable_segments in {variable} in the processes that share GPU memory"
                + ("" if getfd is None else f"; {_PTRACE_CURE}"),
            )
    return Finding("expandable-segments", "ok", "PyTorch's allocator is not told to use them")


def _read_of(libc: ctypes.CDLL, pid: int, address: int) -> str | None:
    """Why another process's eight bytes can't be read."""
    here = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)  # a struct iovec
    remote = (ctypes.c_size_t * 2)(address, 8)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.process_vm_readv(pid, local, one, remote, one, none) != 8:
        return os.strerror(ctypes.get_errno())
    return None if here.value == b"vllm-wt" else "it gave other bytes"


def _getfd_of(libc: ctypes.CDLL, pid: int) -> str | None:
    """Why another process's file descriptor can't be taken over."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        return error.strerror
    try:
        got = libc.syscall(_PIDFD_GETFD, handle, 1, 0)
        if got < 0:
            return os.strerror(ctypes.get_errno())
        os.close(got)
        return None
    finally:
        os.close(handle)


def cuda() -> Iterator[Finding]:
    """Does torch's build fit the device? Imports torch: for a child process."""
    import torch

    driver = Path("/dev/nvidiactl").exists()
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        if driver:
            yield Finding(
                "cuda",
                "warning",
                f"{build} is built without CUDA, on a host with an NVIDIA driver",
                "install torch's CUDA build, unless the weights are in host memory",
            )
        else:
            yield Finding("cuda", "ok", f"{build}, no GPU: weights in host memory only")
    elif not torch.cuda.is_available():
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
            yield Finding("cuda", "ok", f"{build}, GPUs hidden by CUDA_VISIBLE_DEVICES")
        elif driver:
            yield Finding(
                "cuda",
                "problem",
                f"{build} for CUDA {torch.version.cuda} can't use the GPU of this host",
                _CUDA_CURE,
            )
        else:
            yield Finding("cuda", "ok", f"{build}, no GPU here: weights in host memory only")
    else:
        names = []
        for index in range(torch.cuda.device_count()):
            try:  # a kernel that fits the device must be in the build
                torch.ones(1, device=f"cuda:{index}").add_(1).item()
            except RuntimeError as error:
                first = str(error).splitlines()[0]
                found = f"{build} for CUDA {torch.version.cuda} can't use GPU {index}: {first}"
                yield Finding("cuda", "problem", found, _CUDA_CURE)
                return
            names.append(f"{index}: {torch.cuda.get_device_name(index)}")
        yield Finding("cuda", "ok", f"{build}, CUDA {torch.version.cuda}, {', '.join(names)}")


def ports() -> Iterator[Finding]:
    """Can a listening socket be opened and reached?"""
    yield _listen("ports-loopback", "127.0.0.1")
    own = _own_address()
    if own is None:
        yield Finding("ports-own-address", "skipped", "no network but loopback")
    else:
        yield _listen("ports-own-address", own)
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        yield Finding(
            "hostname",
            "warning",
            f"this host's name {name!r} doesn't resolve: {error.strerror}",
            f"add it to /etc/hosts: {own or '127.0.0.1'} {name}",
        )
    else:
        yield Finding("hostname", "ok", f"{name} is {address}")


def _listen(check: str, address: str) -> Finding:
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            server.settimeout(_CONNECT_S)
            with socket.create_connection((address, port), _CONNECT_S), server.accept()[0]:
                pass
    except OSError as error:
        return Finding(
            check,
            "problem",
            f"a TCP socket on {address} can't be listened on and reached: {error}",
            "look at firewall rules and the container's network; is the loopback device up?",
        )
    return Finding(check, "ok", f"a TCP socket on {address} can be listened on and reached")


def _own_address() -> str | None:
    """The address that other hosts are reached from; connecting UDP sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None
