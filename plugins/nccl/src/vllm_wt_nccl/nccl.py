"""Broadcasts between GPUs, by a raw NCCL communicator that can be given up.

torch's own process group of NCCL ends the process when a peer fails, or leaves its kernel spinning on
the GPU, by switches that it shares with vLLM's groups. A communicator of one's own, made not to block,
is asked how it does, and aborted: the kernel ends, and a new one works.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nccl.core as nccl
import torch
from nccl.bindings.nccl import Result
from torch.distributed import Store  # type: ignore[attr-defined]

from vllm_wt.caller import Caller
from vllm_wt.deadline import Deadline
from vllm_wt.errors import PeerDead, TransportError, WeightTransferError
from vllm_wt_nccl.gpus import Gpu, exchanged, require_apart, require_one_library

_LOOK_S = 0.00005
"""Seconds between two looks at NCCL, which has no call that waits."""
_ABORT_S = 5.0
"""Seconds that an abort may take: it waits for the kernels on the GPU; 0.55 seen."""
_LEAST_S = 0.001
_PAIR_BLOCKS = 8
"""Most blocks of a kernel of a pair: several pairs have one GPU at a time, beside what it computes."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NcclBroadcast:
    """A `vllm_wt_nccl.communicator.Broadcast`."""

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        done: Any,
        check: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        self._buffers = buffers  # NCCL may write to them as long as they are here
        self._done = done
        self._check = check
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        """Whether it is known that NCCL is done with the buffers."""
        return not self._buffers

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._buffers:
            self._check()
            if self._is_done():
                break
            self._deadline.check("A broadcast did not come to its end in time", where="nccl")
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        self._buffers = ()
        return True

    def _is_done(self) -> bool:
        with _typed():  # a GPU that has failed says so here
            return bool(self._done.query())


class NcclCommunicator:
    """A `vllm_wt_nccl.communicator.Communicator`.

    Made by all ranks at the same time; that takes until all have come, or the seconds have passed.
    NCCL finds its way by itself; its environment variables are in effect.

    Args:
        store: By which the ranks find each other; new for each communicator.
        rank: Of this side.
        size: All ranks.
        device: A GPU that no other rank has.
        seconds: For making it.
        is_pair: Whether it is one of many of two ranks.

    Raises:
        InvalidInfo: Two ranks are on one GPU, or have different releases of NCCL.
        WeightTransferError: A rank has not come, or cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        seconds: float,
        *,
        is_pair: bool = False,
    ) -> None:
        deadline = Deadline(max(_LEAST_S, seconds))
        self._device = device
        self._aborting = Caller("vllm-wt-nccl-abort")
        self._started: list[NcclBroadcast] = []
        """Held until an abort has ended: until then NCCL may write to their buffers."""
        limits = {"max_ctas": _PAIR_BLOCKS} if is_pair else {}
        with torch.cuda.device(device):
            gpus = exchanged(store, rank, size, _this_gpu(device), deadline)
            require_apart(gpus)
            require_one_library(gpus)
            if rank == 0:
                store.set("id", nccl.get_unique_id().as_bytes.hex())
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # It comes at once: all ranks are here.
            made = nccl.UniqueId.from_bytes(bytes.fromhex(bytes(store.get("id")).decode()))
            self._nccl: Any = nccl.Communicator()
            try:
                with _typed():
                    self._nccl.initialize(
                        size, rank, made, nccl.NCCLConfig(blocking=False, **limits)
                    )
                self._settle(deadline, "The communicator could not be made in time")
            except BaseException:
                self.close()
                raise

    def broadcast(
        self, buffers: Sequence[torch.Tensor], seconds: float, root: int = 0
    ) -> NcclBroadcast:
        deadline = Deadline(max(_LEAST_S, seconds))
        with torch.cuda.device(self._device), _typed():
            self._stream.wait_stream(torch.cuda.current_stream())
            with nccl.group():  # one kernel: between two the link runs empty
                for buffer in buffers:
                    self._nccl.broadcast(buffer, buffer, root, stream=self._stream.cuda_stream)
            # The first one connects the ranks; until that is done nothing else may be asked for.
            self._settle(deadline, "A broadcast could not be started in time")
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._started = [each for each in self._started if not each.is_over]
        broadcast = NcclBroadcast(buffers, done, self._check, deadline)
        self._started.append(broadcast)
        return broadcast

    def close(self) -> bool:
        communicator = self._nccl
        if communicator is None:
            return not self._aborting.is_stuck
        self._nccl = None

        def abort() -> None:
            with torch.cuda.device(self._device):
                communicator.abort()
                self._stream.synchronize()
            self._started.clear()

        done, _ = wait([self._aborting(abort)], timeout=_ABORT_S)
        return bool(done)

    def _check(self) -> None:
        """Raise what has failed."""
        if self._nccl is None:
            raise TransportError(
                "The communicator has been closed", where="nccl", cure="push again"
            )
        self._is_settled()

    def _settle(self, deadline: Deadline, what: str) -> None:
        """Until NCCL has taken in what it was asked for."""
        while not self._is_settled():
            deadline.check(what, where="nccl")
            time.sleep(_LOOK_S)

    def _is_settled(self) -> bool:
        with _typed():
            result = self._nccl.get_async_error()
            if result in (Result.Success, Result.InProgress):
                return bool(result == Result.Success)
            said = f"{Result(result).name}: {self._nccl.get_last_error()}"
        raise (PeerDead if result == Result.RemoteError else TransportError)(
            f"NCCL has failed: {said}",
            where="nccl",
            cure="see which trainer or worker has ended, and its log; NCCL_DEBUG=INFO tells more. "
            "Push again",
        )


def _this_gpu(device: torch.device) -> Gpu:
    # As NCCL tells hosts apart.
    host = (
        os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()}, {_BOOT_ID.read_text().strip()}"
    )
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    library = nccl.get_version().libnccl
    name = "none" if library is None else str(library.version)
    return Gpu(host=host, uuid=uuid, pid=os.getpid(), library=name)


@contextmanager
def _typed() -> Iterator[None]:
    """What NCCL and its binding raise, typed."""
    try:
        yield
    except WeightTransferError:
        raise
    except Exception as error:
        raise TransportError(
            f"NCCL has failed: {type(error).__name__}: {error}",
            where="nccl",
            cure="see its log (NCCL_DEBUG=INFO); the trainer and the workers must reach each other",
        ) from error
