"""The kit on this backend."""

from __future__ import annotations

from vllm_wt.testing.conformance import BackendConformance


class TestNcclP2p(BackendConformance):
    backend = "nccl_p2p"
