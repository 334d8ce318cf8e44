"""The model that benchmarks load into: dense, of bfloat16, as large as is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LAYER_BYTES = 25_171_968
_OTHER_BYTES = 131_074_048
"""Of a layer of the model below, and of all that is not in a layer."""

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vocab_size": 32000,
}


def save_config(folder: Path, megabytes: int, **others: Any) -> None:
    """Write the configuration of a model of about this size, and of one layer at least.

    Args:
        folder: Where to.
        megabytes: Of its weights.
        others: Further entries of the configuration, or other values.
    """
    layers = max(1, round((megabytes * 1e6 - _OTHER_BYTES) / _LAYER_BYTES))
    config = _MODEL | {"num_hidden_layers": layers} | others
    (folder / "config.json").write_text(json.dumps(config))
