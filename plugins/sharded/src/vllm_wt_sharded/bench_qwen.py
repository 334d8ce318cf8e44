"""Computed, not measured: how long a plan for Qwen3-235B takes at least, on links of 50 GB/s.

vLLM's pull request 43375 reports 3.3 s and 6.1 s for its `sharded_rdt`, from 8 H100 to 8 H100.
"""

from __future__ import annotations

from typing import Any

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.planner import plan

_LINK = 50e9
"""Bytes a second of each rank's link, in each direction."""
_PUBLISHED_S = {"dp8ep8": 3.3, "tp8": 6.1}
_RANKS, _LAYERS, _EXPERTS = 8, 94, 128
_HIDDEN, _EXPERT, _HEAD, _HEADS, _KV_HEADS, _VOCABULARY = 4096, 1536, 128, 64, 4, 151936
_BY_ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMN = ("o_proj", "down_proj")
Row = tuple[str, int, tuple[int, ...], tuple[int, ...]]


def computed() -> dict[str, Any]:
    """For both destinations: bytes over the plan's busiest link, and their seconds at link speed."""
    tensors = _tensors()
    source = Layout.of(tensors, (_divided(m, r, 0, _RANKS, r) for m in tensors for r in _ranks()))
    needs = {
        "dp8ep8": Layout.of(tensors, (row for m in tensors for row in _expert_parallel(m))),
        "tp8": Layout.of(tensors, (_tensor_parallel(m, r) for m in tensors for r in _ranks())),
    }
    figures: dict[str, Any] = {
        "computed": "not measured: bytes over the busiest link, at the speed of the link",
        "gigabytes": round(sum(meta.nbytes for meta in tensors) / 1e9, 1),
        "link_gigabytes_per_s": _LINK / 1e9,
    }
    for name, each in needs.items():
        busiest = plan(source, each).busiest
        figures[name] = {
            "busiest_gigabytes": round(busiest / 1e9, 2),
            "seconds": round(busiest / _LINK, 2),
            "published_sharded_rdt_seconds": _PUBLISHED_S[name],
        }
    return figures


def _tensors() -> tuple[TensorMeta, ...]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        own = f"model.layers.{layer}"
        for name, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            shapes[f"{own}.self_attn.{name}_proj.weight"] = (heads * _HEAD, _HIDDEN)
        shapes[f"{own}.self_attn.o_proj.weight"] = (_HIDDEN, _HEADS * _HEAD)
        for name in ("q", "k"):
            shapes[f"{own}.self_attn.{name}_norm.weight"] = (_HEAD,)
        for name in ("input", "post_attention"):
            shapes[f"{own}.{name}_layernorm.weight"] = (_HIDDEN,)
        shapes[f"{own}.mlp.gate.weight"] = (_EXPERTS, _HIDDEN)
        for expert in range(_EXPERTS):
            for name in ("gate", "up"):
                shapes[f"{own}.mlp.experts.{expert}.{name}_proj.weight"] = (_EXPERT, _HIDDEN)
            shapes[f"{own}.mlp.experts.{expert}.down_proj.weight"] = (_HIDDEN, _EXPERT)
    shapes["model.norm.weight"] = (_HIDDEN,)
    shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
    return tuple(TensorMeta(name, "bfloat16", shape) for name, shape in shapes.items())


def _ranks() -> range:
    return range(_RANKS)


def _divided(meta: TensorMeta, rank: int, dim: int, parts: int, part: int) -> Row:
    """One of equal parts along a dimension; every one here divides evenly."""
    each = meta.shape[dim] // parts
    start = tuple(part * each if d == dim else 0 for d in range(len(meta.shape)))
    size = tuple(each if d == dim else full for d, full in enumerate(meta.shape))
    return meta.name, rank, start, size


def _expert_parallel(meta: TensorMeta) -> list[Row]:
    parts = meta.name.split(".")
    if "experts" in parts:
        return [_divided(meta, int(parts[5]) * _RANKS // _EXPERTS, 0, 1, 0)]
    return [_divided(meta, rank, 0, 1, 0) for rank in _ranks()]


def _tensor_parallel(meta: TensorMeta, rank: int) -> Row:
    module = meta.name.split(".")[-2]
    if module in _BY_COLUMN:
        return _divided(meta, rank, 1, _RANKS, rank)
    if module in _BY_ROW:
        # Two ranks have the same head of keys and values, of which there are fewer than ranks.
        parts = _KV_HEADS if module in ("k_proj", "v_proj") else _RANKS
        return _divided(meta, rank, 0, parts, rank * parts // _RANKS)
    return _divided(meta, rank, 0, 1, 0)
