"""Small random checkpoints whose greedy tokens tell them apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelShape:
    """A small Qwen3.

    Args:
        hidden: Hidden size; a multiple of 64.
        layers: Number of layers.
        vocab: Vocabulary size.
        tied: Whether the head shares the embedding's weights.
        dtype: torch's dtype name. float32 keeps greedy tokens free of near-ties.
    """

    hidden: int = 128
    layers: int = 2
    vocab: int = 512
    tied: bool = False
    dtype: str = "float32"


def random_model(shape: ModelShape, seed: int) -> Any:
    """A ``transformers`` Qwen3 with random weights of a scale at which tokens vary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    head_dim = 32
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // head_dim,
        num_key_value_heads=shape.hidden // head_dim // 2,
        head_dim=head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
    )
    model = Qwen3ForCausalLM(config).eval()
    randomize(model, seed)
    return model.to(getattr(torch, shape.dtype))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """New random weights, in place: matrices of unit gain, norms around one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim > 1:
                param.copy_(noise * (1.5 / param.shape[-1] ** 0.5))
            else:
                param.copy_(1 + 0.1 * noise)


def save_checkpoint(model: Any, directory: Path) -> None:
    """Write the model as a checkpoint that vLLM and transformers load."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(directory)


def prompts(shape: ModelShape, count: int = 4, length: int = 8) -> list[list[int]]:
    """Prompts of token ids, the same at each call."""
    import torch

    generator = torch.Generator().manual_seed(1234)
    ids = torch.randint(0, shape.vocab, (count, length), generator=generator)
    return [[int(token) for token in row] for row in ids]


def reference_tokens(
    directory: Path, prompt_ids: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of a checkpoint by transformers, which shares no code with vLLM."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    outputs = []
    for ids in prompt_ids:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append([int(token) for token in out[0, len(ids) :]])
    return outputs
