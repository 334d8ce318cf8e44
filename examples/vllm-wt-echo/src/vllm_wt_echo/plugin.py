"""Entry point of the ``echo`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="echo",
        kind=Kind.TRANSPORT,
        transport="vllm_wt_echo.transport:EchoTransport",
        capabilities=frozenset(
            {
                Capability.CPU,
                Capability.ZERO_COPY,
                Capability.MANY_READERS,
                Capability.MANY_OWNERS,
            }
        ),
        unsupported={
            Capability.CUDA: "host memory only",
            Capability.MULTI_HOST: "listens on loopback only",
        },
        summary="one-sided reads over TCP on one host: the example to copy",
        contract=1,
    )
