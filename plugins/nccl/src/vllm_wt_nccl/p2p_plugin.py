"""Entry point of the ``nccl_p2p`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="nccl_p2p",
        kind=Kind.TRANSPORT,
        transport="vllm_wt_nccl.p2p.transport:P2pTransport",
        capabilities=frozenset(Capability),
        summary="a reader asks, its owner sends: NCCL between GPUs, gloo between CPUs",
        contract=1,
    )
