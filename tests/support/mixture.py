"""A small model with experts."""

from __future__ import annotations

from typing import Any

from vllm_wt.testing.models import randomize

VOCAB = 500


def mixture(seed: int) -> Any:
    """A ``transformers`` Qwen3-MoE of 4 experts with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    randomize(model, seed)
    return model
