"""The model of ``vllm-wt bench round``, and a trainer's weights that change from round to round."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from vllm_wt.packing import DTYPES
from vllm_wt.sources.checkpoint import manifest_of

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "max_position_embeddings": 64,
}
_LARGE = _COMMON | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
MODELS: dict[str, dict[str, Any]] = {
    "1.7b": _LARGE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": _LARGE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": _COMMON
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}
_FILE_NBYTES = 2 << 30
"""Of a checkpoint's file: as much is in host memory at a time."""
_SPARE = 1.25
"""Room for a checkpoint that counts as enough, as a multiple of its size."""


def save_config(model: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))


class TrainerWeights:
    """Random weights of a scale at which an engine's tokens vary, made on their device.

    Args:
        folder: Has the model's configuration.
        device: Where they live.

    Attributes:
        state: By the names of a checkpoint.
        watched: Those that :meth:`become` makes anew; vLLM has them under the same names.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(0)
        self._negated = False
        self.state = {
            each.name: torch.empty(each.shape, dtype=DTYPES[each.dtype], device=device)
            for each in manifest_of(folder).tensors
        }
        self._fill(self.state)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        last = f"model.layers.{layers - 1}"
        names = ("model.norm", f"{last}.self_attn.o_proj", f"{last}.mlp.down_proj")
        self.watched = {f"{name}.weight": self.state[f"{name}.weight"] for name in names}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def become(self, content: int) -> None:
        """Take one of many contents, which is always the same for a number.

        Of two that follow each other no tensor is the same, nor of any two what is watched.
        """
        negated = content % 2 == 1
        if negated != self._negated:
            torch._foreach_neg_(list(self.state.values()))
            self._negated = negated
        self._generator.manual_seed(1 + content)
        self._fill(self.watched)

    def _fill(self, tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            if tensor.ndim > 1:
                tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5, generator=self._generator)
            else:
                tensor.normal_(1.0, 0.1, generator=self._generator)


def room_for_checkpoint(nbytes: int) -> Path | None:
    """A folder in which a checkpoint of this size fits, on a disk rather than in memory."""
    for folder in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        if folder.is_dir() and shutil.disk_usage(folder).free >= _SPARE * nbytes:
            return folder
    return None


def save_checkpoint(model: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Configuration and weights, as an engine loads them when it starts."""
    from safetensors.torch import save_file

    save_config(model, folder)
    files: list[dict[str, torch.Tensor]] = [{}]
    room = _FILE_NBYTES
    for name, tensor in state.items():
        if files[-1] and tensor.nbytes > room:
            files.append({})
            room = _FILE_NBYTES
        files[-1][name] = tensor
        room -= tensor.nbytes
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
