"""The tensors of a checkpoint folder by name, dtype and shape, whether or not its weights are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest
from vllm_wt.packing import meta_of
from vllm_wt.sources.files import INDEX, SafetensorsSource

_WORDS = 300
"""Characters of the words of transformers in an error."""


def require_folder(model_dir: str | os.PathLike[str]) -> Path:
    """The folder of a model.

    Raises:
        InvalidInfo: It is not there, or has no ``config.json``.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise InvalidInfo(
            "There is no such model folder",
            where=str(folder),
            expected="a folder with config.json",
            got="a file" if folder.exists() else "nothing",
            cure="give the path of the folder on this host; a model's name on a hub is not enough",
        )
    if not os.fspath(model_dir):
        raise InvalidInfo(
            "No model folder was given",
            where="model",
            expected="the path of a folder with config.json",
            got="an empty text",
            cure="look whether the variable that you gave is set",
        )
    if not (folder / "config.json").is_file():
        raise InvalidInfo(
            "The folder has no config.json",
            where=str(folder),
            expected="config.json, and the weights or not",
            got=f"{len(list(folder.iterdir()))} other files",
            cure="save the model with save_pretrained(folder), or add its config.json",
        )
    return folder


def has_weights(model_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder has safetensors files, or an index of them."""
    folder = require_folder(model_dir)
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def manifest_of(model_dir: str | os.PathLike[str]) -> Manifest:
    """The tensors of a checkpoint, without reading one.

    From the headers of its safetensors files; where the folder has none, what transformers would
    save of a new model of this configuration.

    Args:
        model_dir: Folder with ``config.json``.

    Raises:
        InvalidInfo: No such folder, or transformers does not know the model.
        ManifestMismatch: Index and files differ, or a dtype cannot be sent.
        CorruptTransfer: A file is truncated or no safetensors file.
    """
    folder = require_folder(model_dir)
    if has_weights(folder):
        return SafetensorsSource(folder).manifest()
    _require_json(folder / "config.json")
    try:
        tensors = _saved(_transformers_model(folder))
    except Exception as error:
        raise InvalidInfo(
            "The folder has no weights, and their names cannot be told from its config.json",
            where=str(folder),
            expected="a model that transformers has, not quantised",
            got=_shortened(error),
            cure="put the checkpoint's safetensors files there, of which only the headers are read; or "
            "install a transformers that has the model",
        ) from error
    return Manifest(tuple(meta_of(name, tensor) for name, tensor in tensors.items()))


def _require_json(path: Path) -> None:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise InvalidInfo(
            "A model's config.json cannot be read",
            where=str(path),
            expected="a JSON object",
            got=found if isinstance(found, ValueError) else type(found).__name__,
            cure="save it again with save_pretrained, or copy it anew",
        )


def _transformers_model(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the checkpoint is quantised, and each method has names of its own")
    (name, *_) = config.architectures or [""]
    known = getattr(transformers, name, None)
    text = config.get_text_config()
    dtype = next(filter(None, (getattr(c, "dtype", None) for c in (config, text))), torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    try:
        with torch.device("meta"):
            if known is not None:
                return known(config)
            return transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)


def _saved(model: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` would write, by the names in its files."""
    declared = getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ()
    ignored = model._keys_to_ignore_on_save or ()
    kept: dict[int, str] = {}
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if n not in ignored}
    for name, tensor in tensors.items():
        if name not in declared or id(tensor) not in kept:
            kept.setdefault(id(tensor), name)
    for name, tensor in tensors.items():  # of tied ones, the name that is not declared as a copy
        if name not in declared and kept[id(tensor)] in declared:
            kept[id(tensor)] = name
    names = set(kept.values())
    state = {name: tensor.detach() for name, tensor in tensors.items() if name in names}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, whose models differ from their files
        return state
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return reverted


def _shortened(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."
