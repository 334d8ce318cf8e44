"""Finds the NIXL build that works here: the wheels for CUDA 12 and 13 have different names."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from vllm_wt.errors import BackendUnavailable
from vllm_wt_rdma.environment import variable

BACKEND = "rdma"
"""Our name in errors."""

MEMORY_EVENTS = "UCX_MEM_EVENTS"
"""Whether UCX sees memory come and go; read when its library is loaded."""
_BUILDS = {"13": "nixl_cu13", "12": "nixl_cu12"}


@dataclass(frozen=True)
class Nixl:
    """An imported NIXL.

    Args:
        module: ``nixl_cu13`` or ``nixl_cu12``.
        version: Distribution and version, for people.
    """

    module: Any
    version: str


@lru_cache(maxsize=1)
def load() -> Nixl:
    """Import NIXL: the build for torch's CUDA if it is there, else the other; both do host memory.

    Raises:
        BackendUnavailable: None is installed, or none can be imported.
    """
    cuda = (torch.version.cuda or "13").split(".")[0]
    builds = sorted(_BUILDS.values(), key=lambda name: name != _BUILDS.get(cuda))
    reasons = []
    for name in builds:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a wheel that doesn't fit fails in many ways: OSError, ...
            reasons.append(f"{name}: {error}")
            continue
        _quieten()
        return Nixl(module, _version(name.replace("_", "-")))
    raise BackendUnavailable(
        "NIXL cannot be imported",
        backend=BACKEND,
        where="import",
        expected=" or ".join(builds),
        got="; ".join(reasons),
        cure="pip install nixl-cu13, or for CUDA 12: pip install 'vllm-wt-rdma[cu12]'",
    )


@contextmanager
def made_for(device: torch.device) -> Iterator[None]:
    """Make agents in here: with UCX set for host memory alone where the device is a CPU.

    UCX would watch every allocation of the process, to drop registrations that it keeps on its own:
    it patches each library that is loaded, 0.4 s of a process's first agent. All our memory is
    registered by hand. ModelExpress does the same (ai-dynamo/modelexpress#688), for CUDA too.
    Not so for another UCX of this process: without its registrations it may crash when a peer dies
    (openucx/ucx#11467).
    """
    if device.type != "cpu" or MEMORY_EVENTS in os.environ:
        yield
    else:
        with variable(MEMORY_EVENTS, "n"):
            yield


def use_cuda(device: torch.device) -> None:
    """Prepare this thread and UCX for a GPU's memory; to be called before an agent is made.

    UCX looks for a CUDA context when an agent starts, and reads over CUDA IPC only where it sees
    NVLinks, unless told to. Without either, reads work all the same, by TCP, at a thousandth of the
    speed and without a word. NIXL 1.5.1 leaves that setting alone; a later one makes it itself
    (ai-dynamo/nixl#2208).

    Args:
        device: With an index.
    """
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)


def _version(dist: str) -> str:
    try:
        return f"{dist} {importlib.metadata.version(dist)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{dist}, built from source"


def _quieten() -> None:
    """NIXL prints each agent's start to stdout, where command lines put their results."""
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
