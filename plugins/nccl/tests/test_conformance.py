"""The kit on this backend."""

from __future__ import annotations

from vllm_wt.testing.conformance import BackendConformance


class TestNccl(BackendConformance):
    backend = "nccl"
