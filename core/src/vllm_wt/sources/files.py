"""A checkpoint folder of safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from vllm_wt.errors import BackendUnavailable, CorruptTransfer, InvalidInfo, ManifestMismatch
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.sources.base import WeightSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


class SafetensorsSource(WeightSource):
    """Weights of a checkpoint folder, read anew at each pass, one file and one tensor at a time.

    The files are ``model.safetensors``; or those that ``model.safetensors.index.json`` names; or,
    with neither, all ``*.safetensors``. The order is by file name, then by tensor name. Tensors are
    on the host. Headers of all files are checked before the first tensor is yielded.

    A tensor maps its file, so it costs no memory until it is read. While one is alive, its file must
    not be written in place: new bytes would show in the tensor, and reading it once the file is
    shorter kills the process.

    Args:
        folder: The folder; another checkpoint may be written into it between rounds.

    Raises:
        BackendUnavailable: The package ``safetensors`` is not installed.
        InvalidInfo: From all members: no such folder, no files in it, or an index that is not one.
        ManifestMismatch: From all members: index and files differ, a name is in two files, or a
            dtype cannot be sent.
        CorruptTransfer: From all members: a file is truncated or no safetensors file. From a pass: a
            file was written meanwhile.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidInfo(
                "This cannot be a checkpoint's folder",
                where="folder",
                expected="a str or a Path",
                got=type(folder).__name__,
                cure="give the folder that holds model.safetensors, or its index",
            )
        self._folder = Path(folder)
        _library()

    def manifest(self) -> Manifest:
        return Manifest(tuple(meta for metas in self._read().values() for meta in metas))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        files = self._read()
        stamps = {path: _stamp(path) for path in files}
        for path, metas in files.items():
            with _opened(path) as file:
                for meta in metas:
                    yield meta.name, file.get_tensor(meta.name)
            if _stamp(path) != stamps[path]:
                raise CorruptTransfer(
                    "A file of the checkpoint was written during the pass",
                    where=str(path),
                    expected="the file that was there when the pass began",
                    got="tensors of both, or parts of them",
                    cure="save each checkpoint into a folder of its own, or after push has returned",
                )

    @property
    def made(self) -> frozenset[str]:
        """All names."""
        return frozenset(meta.name for metas in self._read().values() for meta in metas)

    def _read(self) -> dict[Path, list[TensorMeta]]:
        """What each file holds, by its header, once that fits the index and the other files."""
        index = self._index()
        paths = self._paths() if index is None else sorted({*index.values()})
        files = {path: _header(path) for path in paths}
        found: dict[str, Path] = {}
        for path, metas in files.items():
            for meta in metas:
                if meta.name in found:
                    raise ManifestMismatch(
                        f"Tensor {meta.name!r} is in two files",
                        where=str(self._folder),
                        expected="each name once",
                        got=f"{found[meta.name].name} and {path.name}",
                        cure="remove the file that belongs to another checkpoint",
                    )
                found[meta.name] = path
        if index is not None and index != found:
            raise self._index_differs(index, found)
        return files

    def _index_differs(self, index: dict[str, Path], found: dict[str, Path]) -> ManifestMismatch:
        name = min(name for name in {*index, *found} if index.get(name) != found.get(name))
        return ManifestMismatch(
            f"The index and the files disagree on tensor {name!r}",
            where=str(self._folder / INDEX),
            expected=f"in {index[name].name}" if name in index else "not in the checkpoint",
            got=f"in {found[name].name}" if name in found else "in none of the files",
            cure="save the checkpoint again",
        )

    def _paths(self) -> list[Path]:
        """The files of a folder without an index."""
        single = self._folder / SINGLE
        if single.is_file():
            return [single]
        paths = sorted(
            path for path in self._folder.glob("*.safetensors") if not path.name.startswith(".")
        )
        if not paths:
            raise InvalidInfo(
                "The folder has no safetensors files",
                where=str(self._folder),
                expected=f"{SINGLE}, {INDEX} or *.safetensors",
                got=f"{len(list(self._folder.iterdir()))} other files",
                cure="save the model with save_pretrained(folder, safe_serialization=True)",
            )
        return paths

    def _index(self) -> dict[str, Path] | None:
        """The file of each tensor as the index has it; None without an index."""
        if not self._folder.is_dir():
            raise InvalidInfo(
                "There is no such checkpoint folder",
                where=str(self._folder),
                expected="a folder with safetensors files",
                got="a file" if self._folder.exists() else "nothing",
                cure="give the path of the folder on this host",
            )
        path = self._folder / INDEX
        if not os.path.lexists(path):
            return None
        index = {name: self._inside(path, file) for name, file in _weight_map(path).items()}
        if (self._folder / SINGLE).is_file() and self._folder / SINGLE not in index.values():
            raise InvalidInfo(
                "The folder has two checkpoints",
                where=str(self._folder),
                expected=f"{SINGLE} or {INDEX}",
                got="both, and the index does not name the file",
                cure="remove the older one",
            )
        for name, file in index.items():
            if not file.is_file():
                raise ManifestMismatch(
                    "The index names a file that is missing",
                    where=str(path),
                    expected=f"{file.name}, for tensor {name!r}",
                    got="no such file",
                    cure="fetch or save the checkpoint again; it is incomplete",
                )
        return index

    def _inside(self, index: Path, file: str) -> Path:
        """Judged by its text: the files of a Hugging Face cache are links out of the folder."""
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or "\\" in file or not parts.parts:
            raise InvalidInfo(
                "The index names a file outside of the folder",
                where=str(index),
                expected="names of files in the folder",
                got=repr(file),
                cure="do not use this checkpoint unless you know where it comes from",
            )
        return self._folder / parts


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files = {str(name): PurePosixPath(file).as_posix() for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInfo(
            "The index is not one of safetensors files",
            where=str(path),
            expected='JSON with "weight_map": {tensor: file}',
            got=repr(error),
            cure="save the checkpoint again",
        ) from error
    return files


def _library() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise BackendUnavailable(
            "A checkpoint folder cannot be read without safetensors",
            where="SafetensorsSource",
            expected="the package safetensors",
            got=str(error),
            cure="pip install safetensors",
        ) from error
    return safetensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    library = _library()
    try:
        with library.safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except OSError as error:
        raise InvalidInfo(
            "A file of the checkpoint cannot be opened",
            where=str(path),
            got=str(error),
            cure="check the path and its permissions",
        ) from error
    except library.SafetensorError as error:
        raise CorruptTransfer(
            "A file of the checkpoint cannot be read",
            where=str(path),
            expected="a complete safetensors file, unchanged while it is read",
            got=f"{_stamp(path)[1]} bytes; safetensors says: {error}",
            cure="fetch or save it again; if it is new, pip install -U safetensors",
        ) from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _header(path: Path) -> list[TensorMeta]:
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in sorted(file.keys())}
        return [
            _meta(path, name, part.get_dtype(), part.get_shape()) for name, part in parts.items()
        ]


def _meta(path: Path, name: str, dtype: str, shape: list[int]) -> TensorMeta:
    if dtype not in _DTYPES:
        raise ManifestMismatch(
            f"Tensor {name!r} has a dtype that cannot be sent",
            where=str(path),
            expected=f"one of {', '.join(_DTYPES)}",
            got=dtype,
            cure="save the checkpoint in another dtype",
        )
    if dtype == "F4":  # safetensors counts the numbers, torch the bytes that hold two of them
        shape = [*shape[:-1], shape[-1] // 2]
    return TensorMeta(name, _DTYPES[dtype], tuple(shape))
