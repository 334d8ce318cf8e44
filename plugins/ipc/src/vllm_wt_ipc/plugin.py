"""Entry point of the ``ipc`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="ipc",
        kind=Kind.TRANSPORT,
        transport="vllm_wt_ipc.transport:IpcTransport",
        baseline="vllm_wt_ipc.baseline:IpcCopy",
        doctor="vllm_wt_ipc.doctor:doctor",
        capabilities=frozenset(set(Capability) - {Capability.MULTI_HOST}),
        unsupported={Capability.MULTI_HOST: "memory of one host or one GPU"},
        summary="memory that trainer and workers share: CUDA IPC on one GPU, memfd on one host",
        contract=1,
    )
