"""The kit on the reference backend."""

from __future__ import annotations

from vllm_wt.testing.conformance import BackendConformance


class TestEcho(BackendConformance):
    backend = "echo"
