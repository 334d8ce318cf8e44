"""Models of which a plain reload makes something else than vLLM loads from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [
    pytest.mark.xdist_group("models"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's CPU build"),
]


KINDS = ("slices", "batches", "modes")


def assert_right(answers: list[dict[str, Any]]) -> None:
    """Every way that was tried makes the model that vLLM loads, and moves nothing."""
    for answer in answers:
        ways = [answer, *(way for kind in KINDS for way in answer[kind].values())]
        assert [way["identity"] for way in ways] == [[]] * len(ways)
        assert [way["update"] for way in ways] == [[]] * len(ways)
        for failed in answer["failed"]:
            assert failed["error"] != "none"
            assert (failed["on meta"], failed["armed"], failed["identity"]) == ([], [], [])


@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_that_are_loaded_past_their_loaders(ranks, checkpoint, tp):
    """GPT-OSS: vLLM counts what passes its loaders, and puts the old values back over the rest."""
    folders = [str(checkpoint("gpt-oss", seed)) for seed in (0, 1)]
    answers = ranks(tp, False).ask(*folders, False, ["layerwise"])
    assert_right(answers)
    assert [answer["report"]["fallback"] for answer in answers] == [{}] * tp


def test_a_reload_that_would_leave_them_is_refused(ranks, checkpoint):
    folders = [str(checkpoint("gpt-oss", seed)) for seed in (0, 1)]
    with pytest.raises(pytest.fail.Exception, match="would keep its old values"):
        ranks(1, False).ask(*folders, False, ["reload"])


@pytest.mark.parametrize("tp", [1, 2])
def test_a_view_of_a_weight_that_was_packed(ranks, checkpoint, tp):
    """Mamba-2, whose mixer also is loaded by its own loader: it computes with what it is given."""
    folders = [str(checkpoint("mamba2", seed)) for seed in (0, 1)]
    answers = ranks(tp, False).ask(*folders)
    assert_right(answers)
    for answer in answers:
        assert set(answer["report"]["fallback"]) == {
            "backbone.layers.0.mixer",
            "backbone.layers.1.mixer",
        }


def test_a_quantised_checkpoint(ranks, checkpoint, tmp_path):
    """Its kernel replaces the parameters of the checkpoint by others."""
    folders = [_in_gptq(checkpoint("llama", seed), tmp_path / str(seed), seed) for seed in (0, 1)]
    (answer,) = ranks(1, False).ask(*map(str, folders))
    assert_right([answer])
    assert "model.layers.0.mlp.down_proj" in answer["report"]["layerwise"]


def test_a_kernel_that_keeps_what_a_reload_frees_is_refused(ranks, checkpoint, tmp_path):
    folders = [_in_int8(checkpoint("llama", seed), tmp_path / str(seed)) for seed in (0, 1)]
    with pytest.raises(pytest.fail.Exception, match="goes on with memory of the first load"):
        ranks(1, False).ask(*map(str, folders))


def _in_gptq(source: Path, folder: Path, seed: int) -> Path:
    """A checkpoint of random 4-bit weights, in groups of 128."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        layer = name.removesuffix("weight")
        bits = torch.randint(-(2**31), 2**31 - 1, (columns // 8, rows), generator=generator)
        scales = torch.rand(columns // 128, rows, generator=generator) * 0.02 + 0.005
        tensors[f"{layer}qweight"] = bits.int()
        tensors[f"{layer}qzeros"] = torch.full((columns // 128, rows // 8), 0x77777777).int()
        tensors[f"{layer}scales"] = scales.bfloat16()
        tensors[f"{layer}g_idx"] = torch.zeros(columns, dtype=torch.int32)
    quantisation = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }
    return _saved(tensors, quantisation, source, folder)


def _in_int8(source: Path, folder: Path) -> Path:
    """A checkpoint in the form of compressed-tensors, a scale for each row."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj.weight" in name:
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    values = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": values | {"strategy": "channel", "dynamic": False},
        "input_activations": values | {"strategy": "token", "dynamic": True},
    }
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return _saved(tensors, quantisation, source, folder)


def _saved(
    tensors: dict[str, torch.Tensor], quantisation: dict[str, Any], source: Path, folder: Path
) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder
