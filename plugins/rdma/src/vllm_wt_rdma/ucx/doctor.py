"""What would keep UCX without NIXL from moving bytes here: the part of ``vllm-wt doctor``.

A second process exposes memory, this one reads it as a worker does, and the second one's log tells by
which transports UCX has sent it.
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vllm_wt.cli.doctor.finding import Finding
from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.transport import Copy
from vllm_wt_rdma import doctor
from vllm_wt_rdma.ucx import bindings
from vllm_wt_rdma.ucx.transport import UcxTransport

_BYTES = 1 << 20
"""So many that they don't go along with the message that announces them."""
_READ_S = 60.0
_END_S = 10.0
_OWNER = "from vllm_wt_rdma.ucx.doctor import serve; serve()"
_NAME = "doctor-owner"


def findings(kinds: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Whether UCXX is there, and a read of each kind of memory; changes this process's environment."""
    if importlib.util.find_spec("ucxx") is None:
        yield Finding("ucx", "skipped", f'no UCXX, for transport="ucx": {bindings.CURE}')
        return
    # NIXL's UCX has read its own setting when it was loaded.
    os.environ["UCX_LOG_FILE"] = f"{folder}/ucxx-%p.log"
    try:
        yield Finding("ucx", "ok", bindings.load().version)
    except WeightTransferError as error:
        yield Finding("ucx", "problem", f"{error.what}: {error.got}", error.cure or bindings.CURE)
        return
    for kind in kinds:
        yield _read(kind, folder)


def _read(kind: str, folder: Path) -> Finding:
    check = f"ucx-read-{kind}"
    log = folder / f"ucxx-{os.getpid()}.log"
    seen = len(doctor.text_of(log))
    path = folder / f"ucx-handle-{kind}"
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(path), kind], stdin=subprocess.PIPE)
    reader: UcxTransport | None = None
    try:
        deadline = Deadline(_READ_S)
        while not path.exists():
            if owner.poll() is not None:
                raise RuntimeError(f"the peer's process ended with {owner.returncode}")
            deadline.check("The peer's process has not started")
            time.sleep(0.01)
        reader = UcxTransport("doctor", doctor.device_of(kind))
        same = _transfer(reader, path.read_bytes(), kind, deadline)
    except Exception as error:
        return doctor.problem(check, error, doctor.text_of(log)[seen:], library="UCXX")
    finally:
        if reader is not None:
            reader.close()
        _end(owner)
    if not same:
        return Finding(check, "problem", "a read of 1 MiB brought other bytes", "reinstall UCXX")
    return judge_path(kind, doctor.text_of(folder / f"ucxx-{owner.pid}.log"))


def judge_path(kind: str, log: str) -> Finding:
    """From the owner's tables of protocols: what messages from this kind of memory go by."""
    paths = doctor.tables(log, f"tagged message by ucp_tag_send* from {doctor.MEMORY[kind]}")
    found = f"1 MiB read from another process, by {', '.join(paths) or 'an unknown path'}"
    text = " ".join(paths)
    if kind == "cuda" and "cuda_ipc" not in text:
        cure = "unset UCX_TLS; see expandable-segments; give both containers --ipc=host"
        return Finding(f"ucx-read-{kind}", "warning", f"{found}: not by CUDA IPC", cure)
    if any(name in text for name in ("sysv", "posix")):
        cure = "unset UCX_POSIX_ERROR_HANDLING and UCX_SYSV_ERROR_HANDLING, or UCX_TLS"
        found = f"{found}: a trainer that dies may take its workers with it"
        return Finding(f"ucx-read-{kind}", "warning", found, cure)
    return Finding(f"ucx-read-{kind}", "ok", found)


def _transfer(reader: UcxTransport, handle: bytes, kind: str, deadline: Deadline) -> bool:
    target = torch.zeros(_BYTES, dtype=torch.uint8, device=doctor.device_of(kind))
    region = reader.register([target])
    reader.open(_NAME, 1, handle, deadline)
    reading = reader.submit(reader.prepare(region, [Copy(_NAME, 0, 0, 0, 0, _BYTES)]))
    while not reader.poll(reading).done:
        deadline.check("The read has not completed")
        time.sleep(0.001)
    return torch.equal(target.cpu(), _content())


def _end(owner: subprocess.Popen[bytes]) -> None:
    """It ends with its stdin, and writes the rest of its log."""
    try:
        owner.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        owner.kill()
        owner.communicate()


def serve() -> None:
    """The peer: writes its handle to a file and serves reads until its stdin ends."""
    path, kind = Path(sys.argv[1]), sys.argv[2]
    owner = UcxTransport(_NAME, doctor.device_of(kind))
    region = owner.register([_content().to(doctor.device_of(kind))])
    part = path.with_suffix(".part")
    part.write_bytes(owner.expose(region, 1))
    part.rename(path)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        owner.progress()
    owner.close()


def _content() -> torch.Tensor:
    return (torch.arange(_BYTES) * 37 % 251).to(torch.uint8)
