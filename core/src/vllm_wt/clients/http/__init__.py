"""Calls over HTTP, for a trainer whose engine is a vLLM OpenAI server.

The server has the routes when it was started with ``VLLM_SERVER_DEV_MODE=1`` and a
``weight_transfer_config``. They are for a trusted network: vLLM's ``--api-key`` does not cover them.
"""

from vllm_wt.clients.http.client import HttpClient, Timeouts

__all__ = ["HttpClient", "Timeouts"]
