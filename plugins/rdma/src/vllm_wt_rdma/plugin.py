"""Entry point of the ``rdma`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="rdma",
        kind=Kind.TRANSPORT,
        transport="vllm_wt_rdma.transport:NixlTransport",
        baseline="vllm_wt_rdma.baseline:NixlRead",
        doctor="vllm_wt_rdma.doctor:doctor",
        capabilities=frozenset(Capability),
        summary="one-sided reads over NIXL and UCX, within a host and between hosts",
        contract=1,
    )
