"""Entry point of the ``sharded`` backend. Import-light."""

from __future__ import annotations

from vllm_wt.hookspecs import hookimpl
from vllm_wt.spec import BackendSpec, Capability, Kind


@hookimpl
def vllm_wt_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="sharded",
        kind=Kind.ENGINE,
        worker="vllm_wt_sharded.worker:ShardedEngine",
        trainer="vllm_wt_sharded.trainer:ShardedTrainer",
        baseline="vllm_wt_rdma.baseline:NixlRead",
        planner="vllm_wt_sharded.plan_cli:plan_source",
        benchmarks={"planner": "vllm_wt_sharded.bench_planner:planner"},
        capabilities=frozenset(Capability),
        summary="from the trainer's shards straight to the workers' shards, over rdma, ipc or nccl_p2p",
        contract=1,
    )
