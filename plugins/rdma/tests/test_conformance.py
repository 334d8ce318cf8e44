"""The kit on both transports."""

from __future__ import annotations

import base64
import importlib.util
import json

import pytest

from vllm_wt.testing.conformance import BackendConformance, Harness


class _OfOne(BackendConformance):
    backend = "rdma"

    def test_the_processes_use_it(self, harness: Harness) -> None:
        owner = harness.owner([10])
        handle = json.loads(base64.b64decode(owner.expose("weights", 1)))
        assert handle.get("fabric", "nixl") == self.transport
        assert harness.trainer().describe(10.0)["transport"] == self.transport


class TestNixl(_OfOne):
    transport = "nixl"


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")
class TestUcx(_OfOne):
    transport = "ucx"
