"""What each rank of a trainer holds of the weights, for the kinds of trainers that shard them."""

from vllm_wt_sharded.sources.base import Piece, ShardedSource
from vllm_wt_sharded.sources.declared import DeclaredShards
from vllm_wt_sharded.sources.joining import exchange, joined
from vllm_wt_sharded.sources.rules import ParallelTable, Rule, Split
from vllm_wt_sharded.sources.table import TableShards
from vllm_wt_sharded.sources.tensors import TensorShards
from vllm_wt_sharded.sources.vllm_source import VllmShards

__all__ = [
    "DeclaredShards",
    "ParallelTable",
    "Piece",
    "Rule",
    "ShardedSource",
    "Split",
    "TableShards",
    "TensorShards",
    "VllmShards",
    "exchange",
    "joined",
]
