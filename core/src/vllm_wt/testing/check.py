"""Collected by ``vllm-wt check``: the kit on the backend that ``--wt-backend`` names."""

from vllm_wt.testing.conformance import BackendConformance


class TestBackend(BackendConformance):
    """The backend of the command line."""
