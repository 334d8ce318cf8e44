"""What ``vllm-wt plan --source`` says of a transfer: figures, and lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_wt.cli.plan_rank import size_text
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import Layout

_MOST_SHOWN = 8
"""Ranks, and workers, up to which all links are shown in lines."""
_COMPUTED = "computed, not measured, from what the busiest rank or worker reads"


@dataclass(frozen=True)
class Links:
    """(ranks of the trainer, workers) each; the workers engine by engine.

    Args:
        needed: Bytes that the worker takes from the rank.
        reads: How many reads that is.
        read: Bytes of these, with what lies between short pieces, and in whole blocks.
    """

    needed: Ints
    reads: Ints
    read: Ints


@dataclass(frozen=True)
class Report:
    """A planned transfer.

    Args:
        spec: How the trainer holds the model, as it was given.
        source: What the trainer's ranks hold.
        replicas: Engines.
        links: What goes over each link.
        out_bound: Bytes that the busiest rank gives at least, in any plan.
        in_bound: Bytes that the busiest worker takes, in any plan.
        speeds: Of a rank's link in each direction, in GB/s.
    """

    spec: str
    source: Layout
    replicas: int
    links: Links
    out_bound: float
    in_bound: int
    speeds: tuple[float, ...]

    @property
    def workers(self) -> int:
        """Of all engines together."""
        return int(self.links.needed.shape[1])

    @property
    def receivers(self) -> str:
        """The workers in words."""
        return f"{counted(self.workers, 'worker')} in {counted(self.replicas, 'engine')}"

    @cached_property
    def out(self) -> dict[str, Any]:
        """Bytes that the trainer's ranks give."""
        return _side(self.links.needed.sum(axis=1))

    @cached_property
    def into(self) -> dict[str, Any]:
        """Bytes that the workers take."""
        return _side(self.links.needed.sum(axis=0))

    @property
    def ratio(self) -> float:
        """The busiest of all ranks and workers, in units of the least that is possible."""
        return float(max(self.out["max"], self.into["max"]) / max(self.out_bound, self.in_bound, 1))

    @property
    def seconds(self) -> list[float]:
        """For each speed, how long the busiest rank or worker is busy at least."""
        read = self.links.read
        busiest = max(int(read.sum(axis=axis).max(initial=0)) for axis in (0, 1))
        return [busiest / (speed * 1e9) for speed in self.speeds]

    def as_json(self) -> dict[str, Any]:
        """All of it, JSON-safe."""
        return {
            "spec": self.spec,
            "ranks": self.source.ranks,
            "workers": self.workers,
            "replicas": self.replicas,
            "model_bytes": self._model,
            "held_bytes": self._held,
            "bytes": int(self.links.needed.sum()),
            "links": self.links.needed.tolist(),
            "out": self.out,
            "in": self.into,
            "bound": {
                "out_bytes": round(self.out_bound),
                "in_bytes": self.in_bound,
                "ratio": round(self.ratio, 4),
            },
            "reads": int(self.links.reads.sum()),
            "read_bytes": int(self.links.read.sum()),
            "read_links": self.links.read.tolist(),
            "computed": _COMPUTED,
            "seconds": [
                {"gigabytes_per_s": speed, "seconds": seconds}
                for speed, seconds in zip(self.speeds, self.seconds, strict=True)
            ],
        }

    def lines(self) -> Iterator[str]:
        """The most important of it; every link where there are few."""
        needed, read = self.links.needed, int(self.links.read.sum())
        total = int(needed.sum())
        yield (
            f"trainer    {self.spec}: {counted(self.source.ranks, 'rank')} hold "
            f"{size_text(self._held)}, {self._held / max(self._model, 1):.2f} times the model"
        )
        yield (
            f"workers    {self.receivers} take {size_text(total)} over {(needed > 0).sum()} of "
            f"{counted(needed.size, 'link')}"
        )
        for title, side, who in (("out", self.out, "rank"), ("in", self.into, "worker")):
            yield (
                f"{title:<11}at most {size_text(side['max'])}, of {who} {side['busiest']}; mean "
                f"{size_text(side['mean'])}, max / mean {side['max_over_mean']:.3f}"
            )
        yield (
            f"bound      {self.ratio:.3f} times the least possible: in any plan a rank gives "
            f"{size_text(self.out_bound)}, and a worker takes {size_text(self.in_bound)}"
        )
        yield (
            f"reads      {self.links.reads.sum()} of {size_text(read)}, {read / max(total, 1):.2f} "
            "times what is needed: whole blocks, and what lies between short pieces"
        )
        times = (
            f"{seconds:.3g} at {speed:g} GB/s"
            for speed, seconds in zip(self.speeds, self.seconds, strict=True)
        )
        yield f"seconds    {', '.join(times)}: {_COMPUTED}"
        if max(needed.shape) <= _MOST_SHOWN:
            yield from self._table()

    def _table(self) -> Iterator[str]:
        yield "from \\ to  " + "".join(f"{f'worker {n}':>13}" for n in range(self.workers))
        for rank, row in enumerate(self.links.needed.tolist()):
            yield f"{f'rank {rank}':<11}" + "".join(f"{size_text(each):>13}" for each in row)

    @property
    def _model(self) -> int:
        return sum(meta.nbytes for meta in self.source.tensors)

    @cached_property
    def _held(self) -> int:
        elements = self.source.size.prod(axis=1)
        return int((elements * self.source.itemsizes[self.source.tensor]).sum())


def counted(count: int, noun: str) -> str:
    """So many of something."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _side(totals: Ints) -> dict[str, Any]:
    mean = float(totals.mean())
    most = int(totals.max())
    return {
        "max": most,
        "busiest": int(totals.argmax()),
        "mean": round(mean, 1),
        "max_over_mean": round(most / mean, 4) if mean else 0.0,
    }
