"""Rounds as Prometheus metrics, by the package ``prometheus_client``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_wt.errors import BackendUnavailable
from vllm_wt.hookspecs import hookimpl

if TYPE_CHECKING:
    from vllm_wt.errors import WeightTransferError
    from vllm_wt.results import PushResult

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RoundMetrics:
    """``vllm_wt_rounds_total`` by outcome (``ok``, ``failed``) and error code, ``vllm_wt_bytes_total``,
    ``vllm_wt_version``, ``vllm_wt_engines_left_out_total``, and histograms in seconds:
    ``vllm_wt_round_seconds``, and ``vllm_wt_stage_seconds`` by stage, over all engines.

    Args:
        registry: Of ``prometheus_client``; by default its global one. To serve it is the trainer's own
            business: ``prometheus_client.start_http_server(port)``.

    Raises:
        BackendUnavailable: ``prometheus_client`` is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError:
            raise BackendUnavailable(
                "Metrics need the package prometheus_client",
                where="RoundMetrics",
                cure="pip install 'vllm-wt[prometheus]'",
            ) from None
        own: dict[str, Any] = {"registry": registry or REGISTRY}
        self._rounds = Counter(
            "vllm_wt_rounds", "Pushes, by how they ended", ["outcome", "code"], **own
        )
        self._bytes = Counter("vllm_wt_bytes", "Payload bytes of committed pushes", **own)
        self._left_out = Counter(
            "vllm_wt_engines_left_out", "Engines that a push has gone on without", **own
        )
        self._version = Gauge("vllm_wt_version", "Version that was committed last", **own)
        self._seconds = Histogram(
            "vllm_wt_round_seconds", "Seconds of a committed push", buckets=_SECONDS, **own
        )
        self._stages = Histogram(
            "vllm_wt_stage_seconds",
            "Seconds of a stage on one engine",
            ["stage"],
            buckets=_SECONDS,
            **own,
        )

    @hookimpl
    def vllm_wt_round_finished(self, stats: PushResult) -> None:
        self._rounds.labels("ok", "").inc()
        self._bytes.inc(stats.nbytes)
        self._left_out.inc(len(stats.failed))
        self._version.set(stats.version)
        self._seconds.observe(stats.total_s)
        for stages in stats.engines.values():
            for stage, seconds in asdict(stages).items():
                self._stages.labels(stage).observe(seconds)

    @hookimpl
    def vllm_wt_round_failed(self, version: int, error: WeightTransferError) -> None:
        del version
        self._rounds.labels("failed", error.code).inc()
