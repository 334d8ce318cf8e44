"""The ranks of one engine agree on the outcome of every step before any of them speaks.

vLLM's ``collective_rpc`` falls out of step when a rank other than the last one raises: it leaves the
other replies in their queues, and later calls get earlier answers (seen in 0.32).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vllm_wt.errors import Timeout, TransportError

_PAYLOAD = 16384
"""Bytes a rank may say in one exchange."""
_LEAST_S = 0.001
"""Least seconds to wait: torch takes a timeout of 0 ms for none."""


@dataclass(frozen=True)
class Report:
    """What one rank says after a step.

    Args:
        error: Facts of its error, or None.
        step: Which step it speaks of; a late report of another step must not be taken for this one's.
        streams: Whether this rank loads what it receives at once.
    """

    error: dict[str, Any] | None
    step: str = ""
    streams: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        return cls(**json.loads(data))


class Ranks(Protocol):
    """The workers of one engine."""

    rank: int
    size: int

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        """Everybody's report, by rank; every rank must call it."""


class SingleRank:
    """An engine with one worker."""

    rank = 0
    size = 1

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        return [report]


class GroupRanks:
    """Workers that share a CPU process group.

    Args:
        group: A gloo group of the engine's workers.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, report: Report, seconds: float) -> list[Report]:
        """See :class:`Ranks`.

        Raises:
            Timeout: A rank did not answer; its process is stopped or dead.
            TransportError: The group is broken.
        """
        data = report.encode()
        if len(data) > _PAYLOAD - 4 and report.error is not None:
            facts = {name: report.error[name] for name in ("code", "what")}  # these always fit
            data = replace(report, error=facts).encode()
        mine = torch.zeros(_PAYLOAD, dtype=torch.uint8)
        framed = len(data).to_bytes(4, "little") + data
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(parts, mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=max(seconds, _LEAST_S)))
        except RuntimeError as error:
            timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            cls = Timeout if timed_out else TransportError
            raise cls(
                f"The ranks of the engine could not agree: {error}",
                where=f"rank {self.rank} of {self.size}",
                expected=f"an answer of every rank within {seconds:g} s",
                cure="a worker process is stopped or dead: restart the engine",
            ) from error
        reports = []
        for part in parts:
            raw = part.numpy().tobytes()
            reports.append(Report.decode(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
        return reports
