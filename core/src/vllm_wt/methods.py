"""Names of the methods that our engine adds to vLLM's workers, for ``collective_rpc``."""

from __future__ import annotations

from typing import Final

REPORT: Final = "vllm_wt_report"
"""What the worker says of itself."""
ROUND: Final = "vllm_wt_round"
"""A whole round: start, an update with op ``all``, finish."""
