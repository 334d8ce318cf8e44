"""Notices GPU memory of a peer on this host that UCX reads by emulation: right bytes, by TCP, at 0.4
GB/s in place of 80 and more, and without a word.

NIXL does not say which transports UCX has chosen, and UCX says so in its log alone, which belongs to
the process. So the largest of the first reads is made by itself before the others, and timed. One read
may be late for many reasons: a slow one is made again, and the fastest counts.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vllm_wt.errors import TransportError
from vllm_wt_rdma.batching import Rows
from vllm_wt_rdma.info import HostId, NixlHandle
from vllm_wt_rdma.nixl import BACKEND

logger = logging.getLogger(__name__)

GPU = "VRAM"
"""Reads from or into this kind of memory are timed."""
LEAST_RATE = 1e9
"""Bytes a second. Emulation was seen at 0.2 to 0.7e9, CUDA IPC between two GPUs at 255e9."""
LEAST_BYTES = 32 << 20
"""Shorter reads say nothing: a thread may lose the processor for as long."""
LEAST_ROW = 1 << 20
"""Nor do those of shorter pieces on average: each takes tens of microseconds by itself."""
TRIES = 4
"""The first one maps the peer's memory, too."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Key = tuple[str, str, str]
"""An owner, and the kinds of memory that are written and read: what UCX chooses for."""


@lru_cache(maxsize=1)
def this_host() -> HostId:
    """The same in every process and container of a host; empty where Linux does not say."""
    try:
        text = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return text if _UUID.fullmatch(text) else ""


@dataclass(frozen=True)
class Sample:
    """A read that can be timed.

    Args:
        key: Whose memory it reads, of which kinds.
        number: Of the read, at the endpoint.
        nbytes: Its bytes.
        is_error: Whether it is an error if it is emulated.
    """

    key: Key
    number: int
    nbytes: int
    is_error: bool


class Trial:
    """Times a sample; see :class:`Trials`.

    Args:
        sample: The read.
        passed: Called once it need not be timed any more.
        clock: Seconds.
    """

    def __init__(
        self, sample: Sample, passed: Callable[[Key], None], clock: Callable[[], float]
    ) -> None:
        self.sample = sample
        self._passed = passed
        self._clock = clock
        self._since = 0.0
        self._times: list[float] = []

    def begin(self) -> None:
        """The read is posted now."""
        self._since = self._clock()

    def is_over(self) -> bool:
        """The read is complete; whether that will do. If not it is to be made again.

        Raises:
            TransportError: It is emulated.
        """
        self._times.append(max(self._clock() - self._since, 1e-9))
        rate = self.sample.nbytes / min(self._times)
        if rate < LEAST_RATE and len(self._times) < TRIES:
            return False
        owner, into, origin = self.sample.key
        if rate >= LEAST_RATE:
            logger.info(
                "vllm-wt: reads of %s of %s on this host into %s: %.1f GB/s",
                *(_NAMES[origin], owner, _NAMES[into], rate / 1e9),
            )
        else:
            error = _emulated(self.sample, rate)
            if self.sample.is_error:
                raise error
            logger.warning("vllm-wt: %s", error)
        self._passed(self.sample.key)
        return True


class Trials:
    """What a reader has yet to time: each owner on this host once, by the kinds of memory.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passed: set[Key] = set()

    def sample(self, rows: Rows, number: int, owner: NixlHandle) -> Sample | None:
        """What can be timed of a batch; None if it has no GPU's memory, is short, or is of another
        host.

        Between GPUs emulation is a mistake in a set-up. Where one side is host memory UCX has nothing
        better within a host, unless a network adapter does it: that is never more than a warning.
        """
        kinds = (rows.local_kind, rows.remote_kind)
        is_near = bool(this_host()) and owner.host == this_host()
        is_telling = rows.nbytes >= max(LEAST_BYTES, LEAST_ROW * len(rows.local))
        if GPU not in kinds or not is_near or not is_telling:
            return None
        is_error = owner.emulation == "error" and kinds == (GPU, GPU)
        return Sample((rows.owner, *kinds), number, rows.nbytes, is_error)

    def of(self, samples: list[Sample]) -> list[Trial]:
        """Those that a pass is to begin with, the largest of each kind."""
        largest: dict[Key, Sample] = {}
        for sample in samples:
            if sample.key not in self._passed:
                largest[sample.key] = max(
                    largest.get(sample.key, sample), sample, key=lambda one: one.nbytes
                )
        return [Trial(sample, self._passed.add, self._clock) for sample in largest.values()]


_NAMES = {"DRAM": "host memory", "VRAM": "GPU memory"}


def _emulated(sample: Sample, rate: float) -> TransportError:
    owner, into, origin = sample.key
    if into == origin:
        cure = (
            "unset UCX_TLS, or add cuda to it; let torch use the GPU before any other agent of NIXL or "
            "UCX in the process; no expandable_segments in PYTORCH_CUDA_ALLOC_CONF; give both "
            "containers --ipc=host and all GPUs; `vllm-wt doctor` shows what UCX chooses. To go on all "
            'the same: connect(..., emulation="warning")'
        )
    else:
        cure = (
            "within a host UCX has no fast way between host memory and a GPU's: keep the weights on a "
            'GPU, or connect(..., staging="host") where the trainer has them in host memory'
        )
    return TransportError(
        f"{_NAMES[origin]} of {owner!r} on this host is read into {_NAMES[into]} by emulation",
        backend=BACKEND,
        where="read",
        expected=f"more than {LEAST_RATE / 1e9:g} GB/s",
        got=f"{rate / 1e9:.2f} GB/s, the fastest of {TRIES} reads of {sample.nbytes} bytes",
        cure=cure,
    )
