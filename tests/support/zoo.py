"""Small random checkpoints of many model families, under the names that checkpoints really have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SMALL = {  # heads of 32, the smallest that vLLM's attention on a CPU takes
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = _SMALL | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
"""At tensor parallel 2, 32 for each rank: what vLLM's CPU kernel takes without padding."""


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Args:
        config: Class of its configuration in transformers.
        settings: Arguments of the class.
        vocab: Size of the vocabulary. vLLM pads it to a multiple of 64.
        tied: Whether the head shares the embedding's weights.
        pooling: Whether it makes embeddings, and no tokens.
        embedding_gain: Scale of the embedding. Where it is high and the head is tied to it, a random
            model only repeats its last token.
    """

    config: str
    settings: dict[str, Any]
    vocab: int = 256
    tied: bool = False
    pooling: bool = False
    embedding_gain: float = 1.0

    def model(self, seed: int) -> Any:
        """A transformers model with random weights, in bfloat16."""
        import transformers

        shape: dict[str, Any] = {
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.pooling:
            del shape["tie_word_embeddings"]
        config = getattr(transformers, self.config)(**(self.settings | shape))
        auto = transformers.AutoModel if self.pooling else transformers.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        _randomize(model, seed, self.embedding_gain)
        return model.to(torch.bfloat16)

    def save(self, folder: Path, seed: int) -> Path:
        """Write a checkpoint, unless it is there; the folder."""
        from transformers.utils import logging

        if not (folder / "config.json").exists():
            logging.disable_progress_bar()
            self.model(seed).save_pretrained(folder)
            if self.pooling:
                _save_tokenizer(folder, self.vocab)
        return folder


def _save_tokenizer(folder: Path, size: int) -> None:
    """vLLM makes no embeddings without one, of tokens either."""
    from transformers import BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(size - len(special)))]
    BertTokenizer(vocab={word: n for n, word in enumerate(words)}).save_pretrained(folder)


def _randomize(model: torch.nn.Module, seed: int, embedding_gain: float) -> None:
    """Matrices of about unit gain, norms around one, small biases: tokens then vary."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim > 1:
                gain = embedding_gain if param is embedding else 1.5
                param.copy_(noise * (gain / param.shape[-1] ** 0.5))
            elif name.endswith("bias"):
                param.copy_(0.2 * noise)
            else:
                param.copy_(1 + 0.1 * noise)


COMMON: dict[str, Family] = {
    "llama": Family("LlamaConfig", _GROUPED),
    "llama-tied": Family("LlamaConfig", _GROUPED, tied=True),
    "llama-padded": Family("LlamaConfig", _GROUPED, vocab=200),
    "qwen2": Family("Qwen2Config", _GROUPED),
    "qwen3": Family("Qwen3Config", _GROUPED | {"head_dim": 32}, tied=True),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        _GROUPED
        | _EXPERTS
        | {"head_dim": 32, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""Tested in CI."""

OTHERS: dict[str, Family] = {
    "mixtral": Family("MixtralConfig", _GROUPED | {"num_local_experts": 4}),
    "deepseek-v2": Family(  # latent attention, a dense layer, then experts beside a shared one
        "DeepseekV2Config",
        _SMALL
        | _EXPERTS
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,  # this and the next are the only ones that vLLM takes on a CPU
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gemma2": Family("Gemma2Config", _GROUPED | {"head_dim": 32}, tied=True, embedding_gain=0.2),
    "gemma3": Family(
        "Gemma3TextConfig", _GROUPED | {"head_dim": 32}, tied=True, embedding_gain=0.2
    ),
    "phi3": Family("Phi3Config", _GROUPED),  # fused in the checkpoint
    "gpt2": Family(  # its matrices are transposed in the checkpoint
        "GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}, tied=True
    ),
    "opt": Family(
        "OPTConfig",
        {
            "hidden_size": 128,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 128,
        },
        tied=True,
    ),
    "gpt-neox": Family("GPTNeoXConfig", _SMALL),
    "bert": Family("BertConfig", _SMALL, pooling=True),
}

ODD: dict[str, Family] = {
    "gpt-oss": Family(  # loads parameters past their weight loaders
        "GptOssConfig",
        _GROUPED
        | {
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mamba2": Family(  # keeps a view of a weight that is packed afterwards, and computes with another
        "Mamba2Config",
        {
            "hidden_size": 128,
            "state_size": 16,
            "num_hidden_layers": 2,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 2,
            "conv_kernel": 4,
        },
    ),
}
"""Those that vLLM's own reload gets wrong on a CPU."""

FAMILIES: dict[str, Family] = COMMON | OTHERS | ODD
