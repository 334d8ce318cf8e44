"""The instances that the planner is measured on: layouts of large models, without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.boxes import Ints
from vllm_wt_sharded.layout import Layout

LAYERS, EXPERTS = 61, 384
RANKS, WORKERS = 256, 128
_HIDDEN, _EXPERT, _DENSE, _VOCABULARY = 7168, 2048, 18432, 163840
_SHARD = 4
"""Ranks that a tensor of an expert is divided among."""
_REPLICAS = (2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 6, 8)
"""For each of the expert-parallel shards, how many groups of ranks have it; 64 groups in all."""
_ATTENTION_SHARD = 32
"""Ranks that any other tensor is divided among; each of these has 8 such groups."""
_TENSOR_PARALLEL = 16

_BY_ROW = (
    "q_b_proj",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "embed_tokens",
    "lm_head",
)
_BY_COLUMN = ("o_proj", "down_proj")


def kimi_k2(experts: int = EXPERTS) -> tuple[TensorMeta, ...]:
    """The tensors of a checkpoint like Kimi-K2's, in bfloat16: 2 TB with all ``experts``."""
    metas: list[TensorMeta] = []

    def add(name: str, *shape: int) -> None:
        metas.append(TensorMeta(name, "bfloat16", shape))

    def add_mlp(prefix: str, width: int) -> None:
        add(f"{prefix}.gate_proj.weight", width, _HIDDEN)
        add(f"{prefix}.up_proj.weight", width, _HIDDEN)
        add(f"{prefix}.down_proj.weight", _HIDDEN, width)

    add("model.embed_tokens.weight", _VOCABULARY, _HIDDEN)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}"
        add(f"{own}.input_layernorm.weight", _HIDDEN)
        add(f"{own}.self_attn.q_a_proj.weight", 1536, _HIDDEN)
        add(f"{own}.self_attn.q_a_layernorm.weight", 1536)
        add(f"{own}.self_attn.q_b_proj.weight", 64 * 192, 1536)
        add(f"{own}.self_attn.kv_a_proj_with_mqa.weight", 576, _HIDDEN)
        add(f"{own}.self_attn.kv_a_layernorm.weight", 512)
        add(f"{own}.self_attn.kv_b_proj.weight", 64 * 256, 512)
        add(f"{own}.self_attn.o_proj.weight", _HIDDEN, 64 * 128)
        add(f"{own}.post_attention_layernorm.weight", _HIDDEN)
        if layer == 0:
            add_mlp(f"{own}.mlp", _DENSE)
            continue
        add(f"{own}.mlp.gate.weight", experts, _HIDDEN)
        add(f"{own}.mlp.gate.e_score_correction_bias", experts)
        add_mlp(f"{own}.mlp.shared_experts", _EXPERT)
        for expert in range(experts):
            add_mlp(f"{own}.mlp.experts.{expert}", _EXPERT)
    add("model.norm.weight", _HIDDEN)
    add("lm_head.weight", _VOCABULARY, _HIDDEN)
    return tuple(metas)


def trainer(tensors: Sequence[TensorMeta]) -> Layout:
    """256 ranks: experts by expert parallelism and FSDP, with 2 to 8 replicas; the rest by HSDP.

    Which groups of ranks have a shard differs from layer to layer, and so do the replicas.
    """
    groups = RANKS // _SHARD
    first = np.cumsum([0, *_REPLICAS])
    shards = len(_REPLICAS)
    shapes = _shapes(tensors)
    layer, expert = _layers_and_experts(tensors)
    experts = int(expert.max()) + 1
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []  # tensor, rank, first row, rows
    for shard, replicas in enumerate(_REPLICAS):
        own = np.flatnonzero((expert >= 0) & (expert * shards // experts == shard))
        for replica in range(replicas):
            group = (first[shard] + replica + 5 * layer[own]) % groups
            parts.extend(
                (own, group * _SHARD + k, *_chunk(shapes[own, 0], _SHARD, k)) for k in range(_SHARD)
            )
    rest = np.flatnonzero(expert < 0)
    for rank in range(RANKS):
        part = _chunk(shapes[rest, 0], _ATTENTION_SHARD, rank % _ATTENTION_SHARD)
        parts.append((rest, np.full(len(rest), rank), *part))
    tensor, rank, begin, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    there = rows > 0
    start = np.zeros((int(there.sum()), 2), dtype=np.int64)
    start[:, 0] = begin[there]
    size = shapes[tensor[there]]
    size[:, 0] = rows[there]
    return Layout(
        tuple(tensors),
        tensor[there].astype(np.int32),
        rank[there].astype(np.int32),
        start,
        size,
    )


def expert_parallel(tensors: Sequence[TensorMeta]) -> Layout:
    """128 workers at expert parallel 128: some experts each, all else in full."""
    _, expert = _layers_and_experts(tensors)
    experts = int(expert.max()) + 1
    shapes = _shapes(tensors)

    def boxes(worker: int) -> tuple[Ints, Ints, Ints]:
        own = np.flatnonzero((expert < 0) | (expert * WORKERS // experts == worker))
        return own, np.zeros((len(own), 2), dtype=np.int64), shapes[own]

    return _needs(tensors, [boxes(worker) for worker in range(WORKERS)])


def tensor_parallel(tensors: Sequence[TensorMeta]) -> Layout:
    """128 workers, 8 engines at tensor parallel 16: of every expert a slice each."""
    cut = np.array([_cut_dimension(meta.name) for meta in tensors])
    shapes = _shapes(tensors)
    everything = np.arange(len(tensors))

    def boxes(rank: int) -> tuple[Ints, Ints, Ints]:
        start, size = np.zeros_like(shapes), shapes.copy()
        for d in (0, 1):
            own = cut == d
            size[own, d] //= _TENSOR_PARALLEL
            start[own, d] = rank * size[own, d]
        return everything, start, size

    by_rank = [boxes(rank) for rank in range(_TENSOR_PARALLEL)]
    return _needs(tensors, [by_rank[worker % _TENSOR_PARALLEL] for worker in range(WORKERS)])


DESTINATIONS: dict[str, Callable[[Sequence[TensorMeta]], Layout]] = {
    "ep128": expert_parallel,
    "tp16x8": tensor_parallel,
}


def _needs(tensors: Sequence[TensorMeta], boxes: Sequence[tuple[Ints, Ints, Ints]]) -> Layout:
    """A layout from each worker's tensors, first indices and sizes."""
    counts = [len(own) for own, _, _ in boxes]
    return Layout(
        tuple(tensors),
        np.concatenate([own.astype(np.int32) for own, _, _ in boxes]),
        np.repeat(np.arange(len(boxes), dtype=np.int32), counts),
        np.concatenate([start for _, start, _ in boxes]),
        np.concatenate([size for _, _, size in boxes]),
    )


def _shapes(tensors: Sequence[TensorMeta]) -> Ints:
    return np.array([(*meta.shape, 1)[:2] for meta in tensors], dtype=np.int64)


def _chunk(rows: Ints, parts: int, which: int) -> tuple[Ints, Ints]:
    """First row and rows of one of torch's chunks: all are as large but the last ones."""
    each = -(-rows // parts)
    begin = np.minimum(which * each, rows)
    return begin, np.minimum(begin + each, rows) - begin


def _layers_and_experts(tensors: Sequence[TensorMeta]) -> tuple[Ints, Ints]:
    """(tensors,) each: the layer's number, and the expert's or -1."""
    layers, experts = [], []
    for meta in tensors:
        parts = meta.name.split(".")
        layers.append(int(parts[2]) if parts[1] == "layers" else 0)
        experts.append(int(parts[5]) if "experts" in parts else -1)
    return np.array(layers, dtype=np.int64), np.array(experts, dtype=np.int64)


def _cut_dimension(name: str) -> int:
    module = name.split(".")[-2]
    return 0 if module in _BY_ROW else 1 if module in _BY_COLUMN else -1
