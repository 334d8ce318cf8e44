"""Entry point of the ``rdma`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind

_NIXL = "vllm_wt_rdma.transport:NixlTransport"


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="rdma",
        kind=Kind.TRANSPORT,
        transport=_NIXL,
        transports={"nixl": _NIXL, "ucx": "vllm_wt_rdma.ucx.transport:UcxTransport"},
        baseline="vllm_wt_rdma.baseline:NixlRead",
        baselines={"ucx": "vllm_wt_rdma.ucx.baseline:UcxMessages"},
        doctor="vllm_wt_rdma.doctor:doctor",
        capabilities=frozenset(Capability),
        summary="one-sided reads over NIXL and UCX, or UCX alone, within a host and between hosts",
        contract=1,
    )
