"""What would keep processes from mapping each other's memory here, for ``vllm-wt doctor``.

Runs in a process of its own. It reads four KiB from a second process, as a worker does from a trainer.
"""

from __future__ import annotations

import importlib.metadata
import os
import select
import subprocess
import sys
from collections.abc import Iterator

import torch

from vllm_wt.cli.doctor.finding import Finding
from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt_ipc import cuda, room
from vllm_wt_ipc.transport import IpcTransport

_BYTES = 4096
_READ_S = 60.0
_ROOM_NEEDED = 1 << 30
_OWNER = "from vllm_wt_ipc.doctor import serve; serve()"
_NAME = "doctor-owner"
_GENERATION = 1
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_UNFIT = ("expandable_segments:true", "backend:cudamallocasync")


def doctor() -> Iterator[Finding]:
    """All checks."""
    yield shared_memory()
    yield read("cpu")
    if not torch.cuda.is_available():
        yield Finding("read-cuda", "skipped", "torch sees no GPU")
        return
    yield allocator()
    try:
        cuda.driver()
    except WeightTransferError as error:
        yield _problem("cuda-bindings", error)
        return
    yield Finding("cuda-bindings", "ok", importlib.metadata.version("cuda-bindings"))
    gpus = ", ".join(f"{index}: {gpu}" for index, gpu in cuda.visible().items())
    yield Finding("gpus", "ok", f"visible here: {gpus}")
    yield read("cuda")


def shared_memory() -> Finding:
    """Weights on a CPU are in shared memory, which counts against a container's limit."""
    left = room.available()
    found = f"{left >> 20} MiB of shared memory can be had"
    if left < _ROOM_NEEDED:
        cure = "raise the container's memory limit, or end what uses the memory"
        return Finding("shared-memory", "warning", found, cure)
    return Finding("shared-memory", "ok", found)


def allocator() -> Finding:
    """What torch's allocator makes must be memory that CUDA IPC takes."""
    given = {name: os.environ[name] for name in _ALLOCATOR_SETTINGS if name in os.environ}
    found = ", ".join(f"{name}={value}" for name, value in given.items()) or "at its defaults"
    text = " ".join(given.values()).lower().replace(" ", "")
    if any(setting in text for setting in _UNFIT):
        return Finding(
            "allocator",
            "warning",
            f"{found}: a trainer's weights can't be exposed with that",
            cuda.NO_EXPANDABLE,
        )
    return Finding("allocator", "ok", found)


def read(kind: str) -> Finding:
    """A read of another process's memory of one kind."""
    check = f"read-{kind}"
    device = torch.device(kind)
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        reader = IpcTransport(f"doctor-{kind}", device)
        try:
            deadline = Deadline(_READ_S)
            reader.open(_NAME, _GENERATION, _handle_from(owner, deadline), deadline)
            same = torch.equal(reader.map(_NAME)[0].cpu(), _content())
        finally:
            reader.close()
    except Exception as error:
        return _problem(check, error)
    finally:
        owner.kill()
        owner.communicate()
    if not same:
        cure = "check the memory of the host and of its devices"
        return Finding(check, "problem", "a read of 4 KiB brought other bytes", cure)
    return Finding(check, "ok", "4 KiB mapped from another process")


def serve() -> None:
    """The peer: says its handle on stdout and serves readers until its stdin ends."""
    device = torch.device(sys.argv[1])
    transport = IpcTransport(_NAME, device)
    memory = transport.allocate(_BYTES, device)
    memory.copy_(_content())
    if memory.is_cuda:
        torch.cuda.synchronize(device)
    handle = transport.expose(transport.register([memory]), _GENERATION)
    sys.stdout.buffer.write(handle + b"\n")
    sys.stdout.buffer.flush()
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        transport.progress()
    transport.close()


def _handle_from(owner: subprocess.Popen[bytes], deadline: Deadline) -> bytes:
    assert owner.stdout is not None
    while not select.select([owner.stdout], [], [], min(1.0, deadline.remaining()))[0]:
        deadline.check("The peer's process has not started")
    handle = owner.stdout.readline()
    if not handle:
        raise RuntimeError(f"the peer's process ended with {owner.wait(_READ_S)}")
    return handle


def _content() -> torch.Tensor:
    return (torch.arange(_BYTES) * 37 % 251).to(torch.uint8)


def _problem(check: str, error: Exception) -> Finding:
    if isinstance(error, WeightTransferError):
        parts = [error.what] + ([error.got] if error.got else [])
        cure = error.cure
    else:
        parts, cure = [f"{type(error).__name__}: {error}"], None
    return Finding(check, "problem", "; ".join(parts), cure or "see the error; reinstall torch")
