"""vLLM's side of the bridge; with `clients.local` the only place that imports vllm.

vLLM calls :func:`register` in every process through its ``vllm.general_plugins`` entry points.
"""

from vllm_wt.bridge.register import register

__all__ = ["register"]
