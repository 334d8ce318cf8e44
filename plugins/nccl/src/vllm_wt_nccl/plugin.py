"""Entry point of the ``nccl`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="nccl",
        kind=Kind.ENGINE,
        worker="vllm_wt_nccl.worker:NcclEngine",
        trainer="vllm_wt_nccl.trainer:NcclTrainer",
        native="vllm_wt_nccl.native:NCCLWeightTransferEngine",
        baseline="vllm_wt_nccl.baseline:RawBroadcast",
        capabilities=frozenset(
            {Capability.CPU, Capability.CUDA, Capability.MULTI_HOST, Capability.MANY_READERS}
        ),
        unsupported={
            Capability.ZERO_COPY: "what is sent is packed into buckets first",
            Capability.MANY_OWNERS: "ranks of a trainer that send are one trainer to a worker",
        },
        summary="packed broadcasts to all workers at once: NCCL between GPUs, gloo between CPUs",
        contract=1,
    )
