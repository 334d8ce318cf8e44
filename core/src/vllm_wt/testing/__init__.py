"""Small models, real engines and servers for tests, and the conformance kit for backends.

`BackendConformance` and `Harness` need pytest: ``pip install 'vllm-wt[conformance]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_wt.testing.conformance import BackendConformance, Harness

__all__ = ["BackendConformance", "Harness"]


def __getattr__(name: str) -> Any:
    # The rest of this package is used where there is no pytest.
    if name in __all__:
        from vllm_wt.testing import conformance

        return getattr(conformance, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
