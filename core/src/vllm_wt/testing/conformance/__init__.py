"""The conformance kit: what `docs/contract.md` says, as checks over real processes.

It needs pytest: ``pip install 'vllm-wt[conformance]'``.
"""

from vllm_wt.testing.conformance.gate import needs, transports_only
from vllm_wt.testing.conformance.harness import Harness
from vllm_wt.testing.conformance.suite import BackendConformance

__all__ = ["BackendConformance", "Harness", "needs", "transports_only"]
